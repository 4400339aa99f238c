"""A run that survives the loss of ranks and hosts.

`run` continues a training loop on the ranks that survive. Importing this package imports neither torch nor MPI: the supervisor
(`python -m mpitrain elastic`) runs on hosts that have only Python's standard library.
"""
