"""Averages a tensor over all ranks: mpirun -np 2 python examples/all_reduce.py"""

import torch

import collectives

comm = collectives.world()  # all ranks of the job; starts MPI
x = torch.tensor([float(comm.rank), 10.0])  # or a NumPy array
comm.all_reduce(x, "avg")  # in place: now all ranks have the same values
print(f"rank {comm.rank} of {comm.size}: {x.tolist()}")
