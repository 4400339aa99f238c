"""Compares our training step with other libraries: `mpirun -np N python -m mpitrain bench`.

collectives/bench/kit/ describes the method. All contestants train the same GPT from the same values on the same tokens with the
same AdamW, one batch per rank: in fp32 on CPUs; on GPUs forward and backward compute in bf16.

Memory is measured in separate launches, `--only NAME`, because one process with several contestants has only one peak. `--report`
puts these launches and the common launches into one table.

options.py: the command line. results.py: figures and their file. model.py: the interface of a model with its optimizer.
models.py, deepspeed.py, tensor.py: our models and the peers' models. timing.py: the time of a step and of its parts. memory.py: peaks.
overhead.py: hooks and bookkeeping. bench_report.py: tables of one or several launches. plot.py: pictures. bench_command.py: the whole
command. bits/: the same bits on other ranks and in other layouts. jobs/: the jobs that a benchmark starts. benchmarks/ of a checkout
has more.
"""
