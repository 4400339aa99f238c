"""The memory that a run will need, before it is started: `python -m mpitrain memory`. No MPI, and nothing is allocated."""
