"""Child processes in which HDF5 opens files that may be damaged: there it may crash, and not in a rank."""

import os
import signal

from collectives.launcher import LAUNCHER_PREFIXES

MORE_MEMORY = 384 << 20
"""The bytes that a child may add to what it has when it has imported h5py. HDF5 needs 90 MB for a group of 200,000 datasets, and 300 MB
for a virtual dataset of 20,000 sources. The sizes of values and chunks do not matter, because none are read."""

ALONE = "copy what is wanted to a file of its own (h5copy)"


def environment() -> dict[str, str]:
    """The variables of this process without those of the launcher and of ours, so that the child is no rank, and loads no plug-in."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*LAUNCHER_PREFIXES, "HDF5_", "MPITRAIN_", "LD_PRELOAD"))
    }
    # "::" turns off plug-ins permanently; the path has none either.
    kept |= {"HDF5_PLUGIN_PRELOAD": "::", "HDF5_PLUGIN_PATH": os.devnull, "HDF5_USE_FILE_LOCKING": "FALSE"}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def signal_name(number: int) -> str:
    """The name of the signal that ended a process."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def explained(problem: str) -> str:
    """A problem that HDF5 has with a file, with the limit and a remedy if it is that of memory."""
    if "alloc" not in problem.lower() and "MemoryError" not in problem:
        return problem
    return f"{problem}; the file is damaged, or needs more than {MORE_MEMORY >> 20} MiB of memory to be opened: {ALONE}"
