"""A library whose collectives are measured, and the arrays on which it works."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple, Protocol

from collectives.communicator.communicator import Communicator

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
)  # fmt: skip
Call = Callable[[], Any]


class Arrays(NamedTuple):
    """What an operation works on: the whole array, one rank's part, and a second whole array for all_to_all (else empty)."""

    whole: Any
    part: Any
    other: Any


class Library(Protocol):
    """Another library that has collectives. A new one is a class of this form, and a name in commands/bench.py."""

    name: ClassVar[str]

    def __init__(self, comm: Communicator, ended: ExitStack) -> None:
        """Collective. CannotTakePart on all ranks if the library cannot be used. `ended`: what is to be ended after the measurement."""

    def call(self, operation: str, arrays: Arrays) -> Call:
        """A call of `operation` on the memory of `arrays`. Collective. CannotTakePart on all ranks if the library has no such call."""
