"""`python -m mpitrain diff A B`: compares two runs, or two checkpoints, bit for bit."""
