"""The commands of `python -m collectives`, one file each: its flags (`add_parser`) and what it does (`run`, which gives the exit
code)."""
