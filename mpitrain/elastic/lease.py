"""The lease of a run's folder: a number that each launch of the run, and each loss of ranks, raises.

RUN/.lease has the number, and the run's id, which names the run's copies in node memory. Only the process that holds the folder's lock
(elastic/folder_lock.py) raises the number. It says which of two states is later, and a job with a lower number writes nothing.
"""

import json
import os
import uuid
from pathlib import Path
from typing import NamedTuple

NAME = ".lease"


class Lease(NamedTuple):
    """The id of the run, and the number of this launch or loss."""

    run: str
    number: int


def read_lease(folder: Path) -> Lease | None:
    """The last lease of the run in `folder`; None for a new run."""
    try:
        said = json.loads((folder / NAME).read_text())
        return Lease(str(said["run"]), int(said["number"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def raise_lease(folder: Path) -> Lease:
    """Take the next lease of the run in `folder`. The caller holds the folder's lock. OSError if it cannot be written."""
    last = read_lease(folder) or Lease(uuid.uuid4().hex[:12], 0)
    lease = Lease(last.run, last.number + 1)
    partial = folder / f"{NAME}.{os.getpid()}"
    partial.write_text(json.dumps(lease._asdict()))
    partial.replace(folder / NAME)
    return lease
