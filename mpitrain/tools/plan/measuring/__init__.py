"""Measures the cluster at hand, and writes its machine file: `mpirun -np N python -m mpitrain plan --measure FILE`.

All ranks compute at the same time, as in training, because they share the bandwidth of their memory. constants.py: what the file
contains, and its text. rig.py: the contestants, and how many rounds they play. kernels.py: what a rank computes. links.py: what ranks
send. overheads.py: what steps of the trainer (steps.py) take besides, of a very small GPT (small_gpt.py). memory.py: what a rank may
hold. cluster.py: `measured`, which puts all together. measure_command.py: the command.
"""
