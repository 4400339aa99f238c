"""The commands of `python -m collectives`. Each file has the flags of its command (`add_parser`) and `run`, which carries out the
command and returns the exit code."""
