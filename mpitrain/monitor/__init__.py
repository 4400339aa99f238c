"""Monitoring of runs: what a run records, and the commands that show it.

record/ writes the run's files, sinks/ passes figures on to other tools, gauges/ reads clocks, memory and hardware, reading/ reads a
run's files again. report/, watch/, trace/ and profile/ are the commands. Importing this package imports neither torch nor MPI.
"""
