"""`python -m mpitrain pack FILE`: the environment of Python in one file, which each node unpacks into its memory.

`contents` says which files go in, `compiled` makes their compiled code, `archive` writes the file, and `start.sh` is its head, which
unpacks it and starts commands in it. Nothing here imports torch or MPI.
"""
