"""Measures a training step beside its peers: `mpirun -np N python -m mpitrain bench`.

All contestants train the same GPT from the same values on the same tokens with the same AdamW, one batch a rank, in one launch, and
take turns step by step in drawn orders, so that a disturbance of the machine hits all alike. Before each step all ranks stand at a
barrier; it takes as long as on the slowest rank; shown is the median. In fp32 on CPUs; on GPUs forward and backward compute in bf16.

Memory is measured in launches of their own, `--only NAME`: in a process that holds several contestants nobody's peak can be told apart.
`--report` puts such launches and common ones into one table.

options.py: the command line. results.py: figures and their file. contestants.py, deepspeed.py: who takes part. timing.py: the rounds,
and where a step's time goes. memory.py: peaks. overhead.py: hooks and bookkeeping. report.py: tables, of one launch or of several.
plot.py: pictures. command.py: all of it in order.
"""
