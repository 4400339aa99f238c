"""What a training run will take, before it is started: machines, models and layouts in numbers, their price, and a search.

`command` is `python -m mpitrain plan`. No MPI, and no torch but for what the schedules of pipelines import. `footprint` has formulae
for the memory of any machine; `memory` counts the bytes of the trainer's own operations on CPUs.
"""
