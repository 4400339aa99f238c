"""Monitoring of runs: what a run records, and the commands that show it.

record/ writes the run's files, and parsing/ reads their lines. sinks/ passes figures on to other tools, gauges/ reads clocks, memory
and hardware, machine/ has the machine's limits, reading/ reads a run's files again. report/, watch/, diff/ and trace/ are the commands.
Importing this package imports neither torch nor MPI.
"""
