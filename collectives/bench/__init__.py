"""Measures collectives: every algorithm, "auto", the MPI library called through plain mpi4py, and torch's Gloo, side by side.

All contestants take turns within one job, round by round, so that a disturbance of the machine hits all alike. Before each timed
call each rank writes what it reads, as the computation before a collective does, and all stand at a barrier; a call takes as long as
on its slowest rank; shown is the median over the rounds. As in NVIDIA's nccl-tests, algbw is the whole array's bytes over the time,
and busbw multiplies it by what an optimal algorithm has to move for each byte.

contestants.py, gloo.py: who takes part. timing.py: the rounds. results.py: measurements, bandwidths and files. show.py, plot.py:
tables and pictures. overhead.py: Python's time a call. report.py: several launches together. tuning.py: from measurements to the table
of algorithms.
"""
