"""The commands of `python -m ckpt`, a module each: `add_to(commands)` makes its parser and sets what it runs.

That gets the parsed arguments, and returns the exit code or None for 0. It raises `UsageError`, CheckpointError or OSError for what
`ckpt.cli` prints as one line. What only one command needs and takes a while to import is imported when it runs.
"""
