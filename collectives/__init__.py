"""Collectives: moves arrays between MPI ranks, with algorithms one can read, prove and measure.

    comm = collectives.world()
    comm.all_reduce(x)              # x: an array of torch, NumPy, CuPy or JAX

Importing this package starts nothing; `world()` starts MPI.
"""

from collectives.communicator import Communicator
from collectives.diagnosis import leave_together, on_all_ranks, set_deadline, set_record_folder
from collectives.launcher import is_live_terminal, launched_rank
from collectives.mesh import Mesh
from collectives.start import world
from collectives.table import Table
from collectives.work import Work

__all__ = [
    "Communicator",
    "Mesh",
    "Table",
    "Work",
    "is_live_terminal",
    "launched_rank",
    "leave_together",
    "on_all_ranks",
    "set_deadline",
    "set_record_folder",
    "world",
]
