"""The protocol of a communicator for `ckpt`, and the communicator of one process. `collectives.Communicator` has the protocol."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

from collectives.diagnosis import stacks

# For a rank that saves or loads, a report of a wait shows the place of the call in the program.
stacks.pass_over("ckpt.saving", "ckpt.reading.loading")


@runtime_checkable
class Ranks(Protocol):
    """The six attributes of a communicator that saving and loading need: only control messages, never data."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...

    def broadcast_object(self, obj: Any, root: int = 0) -> Any: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """A block without collectives. If one rank raises an error in it, all ranks raise the error at its end."""
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
        """`Board.give_up` for one process: there is no other rank to wait for."""

    def leave(self) -> None:
        """`Board.leave` for one process."""


def ranks_of(comm: object) -> Ranks:
    """The ranks of the argument `comm`; None means only this process. TypeError without the protocol, such as for mpi4py's."""
    if comm is None:
        return Solo()
    if not isinstance(comm, Ranks):
        raise TypeError(
            f"comm is a {type(comm).__name__}; expected a collectives.Communicator, such as collectives.world(), or None for a "
            "process alone"
        )
    return comm
