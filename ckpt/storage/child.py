"""Child processes in which HDF5 opens files that may be damaged: there it may crash, and not in a rank."""

import os
import signal

from collectives.launcher import LAUNCHER_PREFIXES


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
