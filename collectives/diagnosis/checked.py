"""Checked mode: before each collective the ranks compare their calls.

A fingerprint is the call in words with its number on its communicator. Different ones are an error on all ranks at once. Ranks that
wait for each other's fingerprints on different communicators would wait for ever: the monitor notices that and sets the verdict.
"""

import threading
import time
from hashlib import blake2b
from typing import Any

import numpy as np

from collectives.diagnosis import stacks
from collectives.diagnosis.record import Entry, Log
from collectives.diagnosis.together import raised_on

_SPIN_S = 1e-3  # waits shorter than this one take no nap
_NAP_S = 1e-3

_stranded: list[Any] = []  # requests that no rank will complete any more; MPI may still write to their buffers


def compare_calls(mpi: Any, call: str, entry: Entry) -> None:
    """ValueError on all ranks unless `call`, which describes the collective at hand, is the same on all of them.

    `entry`: of the collective, in the flight record. It numbers the call.
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
    raise raised_on(mpi, ValueError(text), speaker=0)


def _wait(request: Any, buffers: Any, log: Log) -> None:
    """Until all ranks' fingerprints are here; ValueError where the monitor finds that they never will be."""
    log.verdict, log.comparing = None, True
    start = time.monotonic()
    try:
        while not request.Test():
            if log.verdict is not None:
                _stranded.append((request, buffers))
                # Not marked as raised on all ranks: these communicators are lost, so the job must end.
                raise ValueError(log.verdict)
            time.sleep(_NAP_S if time.monotonic() - start > _SPIN_S else 0)
    finally:
        log.comparing = False
