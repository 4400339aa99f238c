"""Proves that runs with slices have the same bits on other ranks and in other layouts: `python -m mpitrain bench bits`, without mpirun.

Each run is a job of the main command. It is compared with a run of the same model on one rank, as `python -m mpitrain diff` does.
cases.py: the table of models and cases. runs.py: one run. bits_command.py: the command.
"""
