"""The lease of a run's folder: a number that each launch of the run, and each loss of ranks, raises.

RUN/.lease has the number, and the run's id, which names the run's copies in node memory. Only the process that holds the folder's lock
(monitor/record/folder_lock.py) raises the number. It says which of two states is later, and a job with a lower number writes nothing.
"""

import json
import re
import uuid
from pathlib import Path
from typing import NamedTuple

from mpitrain.files import read_object, replace
from mpitrain.job.record.files.marks import whole

NAME = ".lease"
_RUN = re.compile(r"\w{1,40}", re.ASCII)  # it becomes a part of the names of files


class Lease(NamedTuple):
    """The id of the run, and the number of this launch or loss."""

    run: str
    number: int


def as_text(lease: Lease | None) -> str:
    """The lease as one word, for a variable; "" for None."""
    return "" if lease is None else f"{lease.run}:{lease.number}"


def first_number(own: Lease, before: str | None) -> int:
    """The number of the first lease of a supervisor's jobs. If the user has asked for another state than the newest one, states with an
    earlier lease do not count.

    `own`: the lease of this job. `before`: `as_text` of the lease before the supervisor's first job; None without a supervisor.
    """
    if before is None:
        return own.number
    run, _, number = before.partition(":")
    return int(number) + 1 if run == own.run else 1


def read_lease(folder: Path) -> Lease | None:
    """The last lease of the run in `folder`; None for a new run, or for no lease that a run has written. OSError."""
    try:
        said = read_object(folder / NAME)
        run, number = str(said["run"]), whole(said["number"])
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return Lease(run, number) if _RUN.fullmatch(run) else None


def raise_lease(folder: Path) -> Lease:
    """Take the next lease of the run in `folder`. The caller holds the folder's lock. OSError if it cannot be written."""
    last = read_lease(folder) or Lease(uuid.uuid4().hex[:12], 0)
    lease = Lease(last.run, last.number + 1)
    replace(folder / NAME, json.dumps(lease._asdict()).encode())
    return lease
