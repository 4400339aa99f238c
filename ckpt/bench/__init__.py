"""Measures saving and loading beside their peers: `mpirun -np N python -m ckpt bench`.

collectives/bench/kit/ tells how it measures. All contestants write the same bytes, flush them to the disk, and read them back into
the same memory. The first round does not count: in it memory is touched, and the loaded values are compared with the saved ones. Loads
read the files of the last save, from the page cache unless told otherwise.

state.py: the tensors. testbed.py: ranks, memory and folders for a turn. stored.py: saving and loading, by `ckpt` and by POSIX
files; dcp.py: by torch. beside.py: saving while a step computes. results.py: figures and their file. report.py: tables, of one launch
or of several, and the goals. command.py: the order of it all.
"""
