"""Measures collectives: every algorithm, "auto", the MPI library called through plain mpi4py, and torch's Gloo, side by side.

kit/ tells how it measures; the benchmarks of `ckpt` and `mpitrain` share it. Before each timed call each rank writes the array that the
call reads, as the computation before a collective does. As in NVIDIA's nccl-tests, algbw is the whole array's bytes over the time,
and busbw multiplies it by the bytes that an optimal algorithm has to move for each byte.

calls.py: the contestants. peer.py: the form of a peer; plain_mpi.py, gloo.py: the peers. timing.py: the time of each at one size.
results.py: measurements, bandwidths and the file. show.py, plot.py: tables and pictures. overhead.py: Python's time a call. report.py:
several launches together. tuning.py: from measurements to the table of algorithms. units.py: bytes and seconds as people write them.
"""
