"""Measures saving and loading beside their peers: `mpirun -np N python -m ckpt bench`.

All contestants write the same bytes, flush them to the disk, and read them back into the same memory, in one launch; they take turns in
drawn orders, so that a disturbance of the machine hits all alike. Before each timed call all ranks stand at a barrier; it takes as
long as on the slowest rank; shown is the median over the rounds. The first round does not count: in it memory is touched, and what was
loaded is compared with what was saved. Loads read what has just been saved, from the page cache unless told otherwise.

state.py: what is saved. contestants.py, dcp.py: who takes part. beside.py: saving while a step computes. timing.py: the rounds.
results.py: figures and their file. report.py: tables, of one launch or of several, and what is to be reached. command.py: all of it
in order.
"""
