"""The heap of the process: memory that a step gives back stays with the process for the next step.

glibc returns the free end of its heap to the system, and maps long pieces anew each time. A step of training frees at its end what the
next one takes again, and so pays for hundreds of megabytes of fresh pages, each of which the system fills with zeros: up to a tenth of
its time, and not the same on all ranks, so that they wait for each other.
"""

import ctypes
import os
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3), malloc.h
_NEVER = -1
_LONGEST = 32 << 20  # bytes of a piece that is kept. Among longer ones the heap would get holes that none of them fits


@cache
def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, in the whole process; returns whether it does. MALLOC_ variables and GLIBC_TUNABLES stand."""
    said = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if said or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and another allocator's does nothing
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LONGEST))
