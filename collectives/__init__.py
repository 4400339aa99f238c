"""Collectives: moves arrays between MPI ranks, with algorithms one can read, prove and measure.

    comm = collectives.world()
    comm.all_reduce(x)              # x: an array of torch, NumPy, CuPy or JAX

Importing this package starts nothing; `world()` starts MPI.
"""

from collectives.communicator.communicator import Communicator
from collectives.communicator.mesh import Mesh
from collectives.communicator.start import world
from collectives.diagnosis import leave_together, on_all_ranks, set_deadline, set_record_folder
from collectives.launcher import is_live_terminal, launched_rank
from collectives.progress.work import Work
from collectives.selection.table import Table

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
