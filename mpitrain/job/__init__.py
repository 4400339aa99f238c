"""`python -m mpitrain`: the main job, and what keeps it running."""
