"""The protocol of a communicator for `ckpt`, and the communicator of one process. `collectives.Communicator` fits as it is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

from collectives.diagnosis import stacks

# What a report of a wait says of a rank that saves or loads: where the program does so.
stacks.pass_over("ckpt.saving", "ckpt.reading.loading")


@runtime_checkable
class Ranks(Protocol):
    """The six things of a communicator that saving and loading need: control messages only, never data."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...

    def broadcast_object(self, obj: Any, root: int = 0) -> Any: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """A block without collectives; what one rank raises in it, all ranks raise at its end."""
        ...


class Solo:
    """One process alone, without MPI."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        pass

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return obj

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    @contextmanager
    def together(self, doing: str = "") -> Iterator[None]:
        yield

    def give_up(self) -> None:
        """As `Board.give_up`: there is no other rank to wait for."""

    def leave(self) -> None:
        """As `Board.leave`."""


def ranks_of(comm: object) -> Ranks:
    """The ranks that a caller means by `comm`; None is a process alone. TypeError for what knows no such things, as mpi4py's."""
    if comm is None:
        return Solo()
    if not isinstance(comm, Ranks):
        raise TypeError(
            f"comm is a {type(comm).__name__}; expected a collectives.Communicator, such as collectives.world(), or None for a "
            "process alone"
        )
    return comm
