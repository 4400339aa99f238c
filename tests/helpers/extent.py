"""How much a run of the tests covers: what shows each fault once, or with `./mpirun/test full` every case, on every number of ranks."""

import os
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("MPITRAIN_TEST_FULL") == "1"


def extent(short: T, full: T) -> T:
    """`short`, or in a full run `full`: a number of rounds, or a list of cases."""
    return full if FULL else short
