"""The heap of the process: memory that a step frees stays in the process for the next step.

glibc returns the free end of its heap to the system, and maps long pieces again each time. A training step frees memory that the next
step allocates again. The system fills these hundreds of megabytes of fresh pages with zeros, which takes up to a tenth of a step. The
time differs between ranks, so ranks wait for each other.
"""

import ctypes
import os
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3), malloc.h
_NEVER = -1
_LONGEST = (
    32 << 20
)  # bytes of the longest piece that is kept; longer pieces would leave holes in the heap that no piece fits


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep freed memory in the process. Returns whether it does. MALLOC_ variables and GLIBC_TUNABLES have priority."""
    said = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if said or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has no mallopt, and other allocators ignore it
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LONGEST))
