"""Compares saving and loading with other libraries: `mpirun -np N python -m ckpt bench`.

collectives/bench/kit/ describes the method. All contestants write the same bytes, flush them to the disk, and read them back into
the same memory. The first round is not timed: it touches the memory, and compares the loaded values with the saved ones. Loads
read the files of the last save, by default from the page cache.

state.py: the tensors. testbed.py: ranks, memory and folders for a turn. stored.py: saving and loading with `ckpt` and with POSIX
files; dcp.py: with torch. beside.py: saving while a step computes. results.py: figures and their file. bench_report.py: tables of one
or several launches, and the goals. bench_command.py: the whole command.
"""
