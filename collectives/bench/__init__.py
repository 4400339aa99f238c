"""Measures collectives: every algorithm, "auto", the MPI library called through plain mpi4py, and torch's Gloo, in the same job.

kit/ explains the method; the benchmarks of `ckpt` and `mpitrain` share it. Before each timed call each rank writes the array that the
call reads, like the computation before a collective. As in NVIDIA's nccl-tests, algbw is the whole array's bytes divided by the time;
busbw is algbw times the bytes that an optimal algorithm must move for each byte of the array.

calls.py: the contestants. peer.py: the interface of a peer; plain_mpi.py, gloo.py: the peers. timing.py: times at one size. results.py:
measurements, bandwidths and the file. show.py, plot.py: tables and pictures. overhead.py: Python's time per call. bench_report.py:
medians over several launches. tuning.py: makes the table of algorithms from measurements. units.py: parses and formats bytes and times.
"""
