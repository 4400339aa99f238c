"""What a training run will take, before it is started: machines, models and layouts in numbers, their price, and the search for the best.

No MPI, and no torch outside of what reads the schedules of pipelines. `python -m mpitrain plan`: see `command`.
"""
