"""The commands of `python -m ckpt`, one module each: `add_to(commands)` makes the parser and sets the function of the command.

The function gets the parsed arguments, and returns the exit code or None for 0. It raises `UsageError`, CheckpointError or OSError,
which `ckpt.cli` prints as one line. Slow imports that only one command needs are made when it runs.
"""
