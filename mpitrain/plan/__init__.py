"""What a training run will take, before it is started: machines, models and layouts in numbers, their price, and a search.

`command` is `python -m mpitrain plan`. No MPI and no torch, except in `memory`, which counts the bytes of the trainer's own operations
on CPUs; `footprint` has formulae for any machine.
"""
