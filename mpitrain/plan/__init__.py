"""What a training run will take, before it is started: machines, models and layouts in numbers, their price, and a search.

No MPI, and no torch but for what the schedules of pipelines import. The command is `python -m mpitrain plan`.
"""
