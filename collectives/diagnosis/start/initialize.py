"""Starts MPI, and ends a wait in MPI_Init for ranks that do not come there.

MPI_Init waits for all ranks. A rank that still imports, or that has ended, keeps the others in it. mpi4py calls it with Python's lock
(the GIL), so that no thread of this process could say so. This module calls it through ctypes, which gives the lock away, and a thread
prints one line after a time and ends the process at the deadline.
"""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from typing import Any

from collectives import launcher
from collectives.diagnosis import dump
from collectives.diagnosis.hangs import deadline
from collectives.diagnosis.start import security
from collectives.diagnosis.start.library import load_mpi4py
from collectives.diagnosis.start.meeting import GRACE_S, limit_s, turn_s, waits

_POLL_S = 0.5
_WHO = "ranks that have not started MPI: they still import, or have ended before collectives.world()"


def start_mpi() -> None:
    """Start MPI, unless the program has imported `mpi4py.MPI` already, or has set `mpi4py.rc.initialize = False` to start MPI itself.

    At the deadline the process ends, and with it the job: a call of MPI_Init cannot be given up.
    """
    import mpi4py

    if "mpi4py.MPI" in sys.modules or mpi4py.rc.initialize in (False, "no") or launcher.launched_size() == 1:
        load_mpi4py()
        return
    mpi4py.rc.initialize = False
    load_mpi4py()
    from mpi4py import MPI

    security.drop_munge()  # now the library is known
    if launcher.launched_rank() == 0 and (line := security.refusal()):
        _say(0, line)
    has_begun = threading.Event()
    threading.Thread(target=_watch, args=(has_begun,), name="collectives-start", daemon=True).start()
    try:
        _init(MPI, _level(MPI, mpi4py.rc))
    finally:
        has_begun.set()
    if mpi4py.rc.errors == "exception":  # mpi4py sets it when it starts MPI itself
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(MPI.ERRORS_RETURN)


def _level(mpi: Any, rc: Any) -> int:
    """The level of thread support that the program asks for."""
    return int(getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE)


def _init(mpi: Any, level: int) -> None:
    """MPI_Init_thread without Python's lock, or by mpi4py if the library's function is not found."""
    for path in (None, mpi.__file__):  # first what a profiler of MPI has preloaded
        with suppress(AttributeError, OSError):
            call = ctypes.CDLL(path).MPI_Init_thread
            break
    else:
        mpi.Init_thread(level)
        return
    if error := call(None, None, level, ctypes.byref(ctypes.c_int())):
        raise mpi.Exception(error)


def _watch(has_begun: threading.Event) -> None:
    """Tell of a long wait in MPI_Init, and end it at the deadline."""
    rank, size = launcher.launched_rank(), launcher.launched_size()
    notice_s, deadline_s = waits()
    end_s = limit_s(notice_s, deadline_s) + GRACE_S + turn_s(rank, size)
    clock = deadline.Clock()  # a batch system may stop all ranks for hours
    began = clock.now
    # Ranks in MPI_Init cannot agree on one that tells it. Rank 1 does so too, because rank 0 may be the one that is missing.
    is_told = not notice_s or rank not in (0, 1)
    while not has_begun.wait(_POLL_S):
        waited_s = clock.look_awake() - began
        if not is_told and waited_s >= notice_s:
            is_told = True
            _say(rank, f"world() has waited {waited_s:.0f} s in MPI_Init for {_WHO}")
        if waited_s >= end_s:
            _say(rank, f"world() has waited {waited_s:.0f} s (MPITRAIN_DEADLINE_S) in MPI_Init for {_WHO}")
            os._exit(deadline.EXIT_CODE)


def _say(rank: int, text: str) -> None:
    dump.RecordOutput.rank = rank
    dump.say(text)
