"""`python -m mpitrain profile`: where the time of a step goes, and what to try."""
