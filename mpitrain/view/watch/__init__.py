"""`python -m mpitrain watch`: a live view of a run."""
