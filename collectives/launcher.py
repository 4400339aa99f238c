"""The launcher of this process, as far as it can be known before MPI starts."""

import os
import sys
from collections.abc import Mapping

# Where launchers say which rank a process is: it is one of several if any of them is set.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")

# Prefixes of a launcher's variables. A child process that inherits these variables acts as a rank, and ends the job.
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPIR_CVAR_")

# Where launchers say how many ranks they have started, and which launcher that is.
_SIZE_VARIABLES = {
    "SLURM_STEP_NUM_TASKS": "srun",  # first: with --mpi=pmi2 it sets PMI_SIZE as well
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "an mpirun of MPICH's family",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
}


def launched_rank() -> int:
    """This process's rank as its launcher told it, without starting MPI; -1 if no launcher did."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), -1)


def is_live_terminal() -> bool:
    """Whether a person sees the output of this process at once.

    mpirun stands between a rank and the terminal, and may give it a terminal of its own where it writes to a file itself: a rank can
    only be told, by MPITRAIN_TTY, as mpirun/train does.
    """
    told = os.environ.get("MPITRAIN_TTY")
    return told == "1" if told is not None else launched_rank() < 0 and sys.stdout.isatty()


def check_launcher(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """RuntimeError if the launcher has started several ranks, and the MPI library `library` knows this process alone: `size` is 1.

    This happens with the mpirun of one MPI and the library of another. Each rank would be a separate job, all of them in the
    same folders. A launcher within a job of another may well start one process, so one variable that says 1 is enough to go on.
    """
    told = {name: int(environ[name]) for name in _SIZE_VARIABLES if environ.get(name, "").isdigit()}
    if environ.get("SLURM_TASK_PID") != str(os.getpid()):
        told.pop("SLURM_STEP_NUM_TASKS", None)  # what a task of srun starts inherits it, and may be meant to run alone
    if size > 1 or not told or min(told.values()) <= 1:
        return
    name, number = next(iter(told.items()))
    launcher = _SIZE_VARIABLES[name]
    if launcher == "srun":
        remedy = "pass srun the --mpi= that this library was built for, such as --mpi=pmix (srun --mpi=list shows all values)"
    else:
        remedy = (
            f"start the job by the mpirun of {library}, or let MPI4PY_LIBMPI name the libmpi.so of the launcher's MPI"
        )
    raise RuntimeError(
        f"{launcher} has started {number} ranks ({name}={number}), but MPI in this process is {library}, which knows 1 rank; expected "
        f"a launcher and a library of the same MPI, because each rank would be a separate job that writes to the same files: {remedy}. "
        f"To run one process alone, remove the launcher's variables: env{''.join(f' -u {each}' for each in told)}"
    )
