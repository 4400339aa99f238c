"""Measures a training step beside its peers: `mpirun -np N python -m mpitrain bench`.

collectives/bench/kit/ tells how it measures. All contestants train the same GPT from the same values on the same tokens with the
same AdamW, one batch a rank. In fp32 on CPUs; on GPUs forward and backward compute in bf16.

Memory is measured in launches of their own, `--only NAME`: in a process that holds several contestants their peaks cannot be told
apart. `--report` puts these launches and common ones into one table.

options.py: the command line. results.py: figures and their file. model.py: a model with its optimizer, as all of them are called.
models.py, deepspeed.py: ours and the peers'. timing.py: a step's time, and where it goes. memory.py: peaks. overhead.py: hooks and
bookkeeping. report.py: tables, of one launch or of several. plot.py: pictures. command.py: all of it in order.
"""
