"""What a training run will take, before it is started: machines, models and layouts in numbers, their price, and a search.

`command` is `python -m mpitrain plan`. `measuring` writes the file of the machine at hand, `comparing` compares predicted with measured
steps there, and `simulation` simulates long runs. `memory` counts the bytes of the trainer's own operations on CPUs; `footprint` has
formulae for any machine. Only `memory`, `measuring` and `comparing` import torch; the last two run on MPI ranks.
"""
