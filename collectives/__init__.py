"""Collectives: moves arrays between MPI ranks, with algorithms that users can read, prove and measure.

    comm = collectives.world()
    comm.all_reduce(x)              # x: an array of torch, NumPy, CuPy or JAX

The import of this package does not start MPI; `world()` does.
"""

import os

# These may have been loaded before this package, which has no name for them then.
from collectives import addresses as addresses
from collectives import cgroup as cgroup
from collectives import files as files
from collectives import secret_forms as secret_forms
from collectives import secret_tokens as secret_tokens
from collectives import texts as texts
from collectives.communicator.communicator import Communicator
from collectives.communicator.mesh import Mesh
from collectives.communicator.start import world
from collectives.diagnosis import leave_together, on_all_ranks, set_deadline, set_failure_file, set_record_folder
from collectives.diagnosis.start import security as _security
from collectives.launcher import environment_of_program, is_live_terminal, launched_rank
from collectives.progress.work import Work
from collectives.selection.table import Table
from collectives.transports.runs import Runs
from collectives.transports.segments import EAGER_BYTES
from collectives.transports.traffic import network_bytes

os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(EAGER_BYTES))  # Open MPI reads it when it starts
_security.drop_munge()

__all__ = [
    "Communicator",
    "Mesh",
    "Runs",
    "Table",
    "Work",
    "environment_of_program",
    "is_live_terminal",
    "launched_rank",
    "leave_together",
    "network_bytes",
    "on_all_ranks",
    "set_deadline",
    "set_failure_file",
    "set_record_folder",
    "world",
]
