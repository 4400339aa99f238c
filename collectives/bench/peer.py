"""The interface of a peer, a library whose collectives are compared with ours, and the arrays that all of them use."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple, Protocol

from collectives.communicator.communicator import Communicator

Call = Callable[[], Any]


class Arrays(NamedTuple):
    """The arrays of an operation: the whole array, one rank's part, and a second whole array for all_to_all (else empty)."""

    whole: Any
    part: Any
    other: Any


class Peer(Protocol):
    """Another library with collectives. A new peer is a class with this interface, and a name in commands/bench.py."""

    name: ClassVar[str]

    def __init__(self, comm: Communicator, ended: ExitStack) -> None:
        """Collective. CannotTakePart on all ranks if the library cannot be used. `ended` ends its resources after the measurement."""

    def call(self, operation: str, arrays: Arrays) -> Call:
        """A call of `operation` on the memory of `arrays`. Collective. CannotTakePart on all ranks if the library does not have it."""
