"""SIGUSR1 means: save a checkpoint and stop. Heard from the first moment, acted upon between two steps, by all ranks together.

Not SIGTERM: Open MPI's mpirun kills its ranks a quarter of a second after that one. It forwards SIGUSR1, and Slurm can send it
ahead of a time limit. Imports no torch, so that it listens before the seconds that takes.
"""

import os
import signal
from pathlib import Path
from types import FrameType

_requested = False


def listen() -> None:
    """From now on SIGUSR1 is a request to stop. One that came earlier may stand in the file that MPITRAIN_STOP_FILE names."""
    signal.signal(signal.SIGUSR1, _request)
    file = os.environ.get("MPITRAIN_STOP_FILE")
    if file and Path(file).exists():
        _request(signal.SIGUSR1, None)


def requested() -> bool:
    """Whether this rank was asked to stop. The others may not know yet."""
    return _requested


def _request(signum: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True
