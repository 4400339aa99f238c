"""Calls on rank 0 whose result all ranks need."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from collectives.diagnosis import stacks

if TYPE_CHECKING:
    from ckpt.ranks import Ranks

T = TypeVar("T")

stacks.pass_over(__name__)


def on_rank0(comm: "Ranks", act: Callable[[], T], doing: str = "") -> T:
    """Call `act` on rank 0, and return its result on all ranks. An error of `act` is raised on all ranks. Collective."""
    result: T | None = None
    with comm.together(doing):
        if comm.rank == 0:
            result = act()
    shared: T = comm.broadcast_object(result)
    return shared
