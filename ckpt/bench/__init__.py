"""Measures saving and loading beside their peers: `mpirun -np N python -m ckpt bench`.

How it measures is told in collectives/bench/kit/. All contestants write the same bytes, flush them to the disk, and read them back into
the same memory. The first round does not count: in it memory is touched, and what was loaded is compared with what was saved. Loads
read what has just been saved, from the page cache unless told otherwise.

state.py: what is saved. testbed.py: what each contestant needs in its turn. stored.py: saving and loading, by `ckpt` and by POSIX
files; dcp.py: by torch. beside.py: saving while a step computes. results.py: figures and their file. report.py: tables, of one launch
or of several, and what is to be reached. command.py: all of it in order.
"""
