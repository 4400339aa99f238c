"""What a run will need of memory, before it is started: `python -m mpitrain memory`. No MPI, and nothing is allocated."""
