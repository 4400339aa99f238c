"""How much a run of the tests covers: what shows each fault once, or with `./mpirun/test full` every case, on every number of ranks."""

import os
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("MPITRAIN_TEST_FULL") == "1"
LEVEL = os.environ.pop("MPITRAIN_TEST_LEVEL", "all")
"""core: the tests that are not marked `rest`; rest: those that are; all: both. A run of pytest that a test starts is not to get it."""


def extent(short: T, full: T) -> T:
    """`short`, or in a full run `full`: a number of rounds, or a list of cases."""
    return full if FULL else short
