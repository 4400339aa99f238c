"""`python -m mpitrain bench monitoring`: the costs of sinks, and the commands that show a run."""
