"""Checked mode: before each collective the ranks compare their calls.

A fingerprint is a hash of the call's description with its number on its communicator. Different fingerprints raise an error on all
ranks. Ranks that wait for fingerprints on different communicators would wait forever: the monitor detects this and sets the verdict.
"""

import threading
import time
from hashlib import blake2b
from typing import Any

import numpy as np

from collectives.diagnosis import stacks
from collectives.diagnosis.record import Entry, Log
from collectives.diagnosis.together import raised_on

_SPIN_S = 1e-3  # a wait sleeps only after this time
_NAP_S = 1e-3

_stranded: list[Any] = []  # requests that will never complete, with their buffers, to which MPI may still write


class DifferentCallsError(ValueError):
    """The ranks call different collectives. The text has a line for each group of ranks."""


def compare_calls(mpi: Any, call: str, entry: Entry) -> None:
    """DifferentCallsError on all ranks unless `call`, a description of the collective, is the same on all of them.

    `entry`: the collective's entry in the flight record, which has its number.
    """
    call = f"#{entry.sequence} {call}"
    digest = np.frombuffer(blake2b(call.encode(), digest_size=16).digest(), np.uint8)
    digests = np.empty((mpi.size, digest.size), np.uint8)
    _wait(mpi.Iallgather(digest, digests), (digest, digests), entry.log)
    if (digests == digest).all():
        return
    calls = mpi.allgather((call, stacks.call_site(threading.get_ident())))
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, key in enumerate(calls):
        groups.setdefault(key, []).append(rank)
    lines = [f"  rank {', '.join(map(str, ranks))}: {what}  at {site}" for (what, site), ranks in groups.items()]
    text = (
        f"the ranks call different collectives, or the same with different arguments, on {entry.log}; expected the same calls in the "
        "same order on each of them:\n" + "\n".join(lines)
    )
    raise raised_on(mpi, DifferentCallsError(text), speaker=0)


def _wait(request: Any, buffers: Any, log: Log) -> None:
    """Wait for all ranks' fingerprints. ValueError if the monitor finds that they will never arrive."""
    log.verdict, log.comparing = None, True
    start = time.monotonic()
    try:
        while not request.Test():
            if log.verdict is not None:
                _stranded.append((request, buffers))
                # Not marked as raised on all ranks: these communicators cannot be used any more, so the job must end.
                raise DifferentCallsError(log.verdict)
            time.sleep(_NAP_S if time.monotonic() - start > _SPIN_S else 0)
    finally:
        log.comparing = False
