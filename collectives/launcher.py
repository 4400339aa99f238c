"""What a process can know of the launcher that started it, before MPI is."""

import os
import sys

# Where launchers say which rank a process is: it is one of several if any of them is set.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

# What a launcher tells its ranks. A child process that inherits it takes itself for a rank, and brings the job down.
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPIR_CVAR_")


def launched_rank() -> int:
    """This process's rank as its launcher told it, without starting MPI; -1 if no launcher did."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), -1)


def is_live_terminal() -> bool:
    """Whether what this process prints is seen at once by a person.

    mpirun stands between a rank and the terminal, and may give it a terminal of its own where it writes to a file itself: a rank can
    only be told, by MPITRAIN_TTY, as mpirun/train does.
    """
    told = os.environ.get("MPITRAIN_TTY")
    return told == "1" if told is not None else launched_rank() < 0 and sys.stdout.isatty()
