"""The peer Gloo: torch.distributed's backend for host memory. Only this file and the kit's torch_group.py import torch.distributed."""

from contextlib import ExitStack
from typing import Any, ClassVar

from collectives.arrays.buffer import is_torch, like
from collectives.arrays.dtypes import dtype_of
from collectives.bench.kit.torch_group import torch_group
from collectives.bench.kit.turns import CannotTakePart
from collectives.bench.peer import Arrays, Call
from collectives.bench.results import GLOO
from collectives.communicator.communicator import Communicator


class Gloo:
    """Calls of torch.distributed, with one thread on each rank."""

    name: ClassVar[str] = GLOO

    def __init__(self, comm: Communicator, ended: ExitStack) -> None:
        ended.enter_context(torch_group(comm))
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._comm, self._torch, self._dist = comm, torch, dist

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._comm.size

    def all_reduce(self, x: Any) -> None:
        """The bare call, for code that has a communicator's `all_reduce`."""
        self._dist.all_reduce(x)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """That of the communicator: for control messages, which are not timed."""
        return self._comm.all_gather_object(obj)

    def call(self, operation: str, arrays: Arrays) -> Call:
        dtype = dtype_of(arrays.whole.dtype).name
        kind, size = getattr(self._torch, dtype), self._comm.size
        try:
            with self._comm.together():
                self._make(operation, *(self._torch.zeros(n, dtype=kind) for n in (size, 1, size)))()
        except Exception as error:
            raise CannotTakePart(f"gloo has no {operation} of {dtype}: {str(error).splitlines()[0]}") from None
        return self._make(operation, *(array if is_torch(array) else like(array, kind) for array in arrays))

    def _make(self, operation: str, whole: Any, part: Any, other: Any) -> Call:
        dist, is_root = self._dist, self._comm.rank == 0
        parts = list(whole.chunk(self._comm.size)) if is_root else None
        # torch 2.13 has renamed two functions, and warns of the old names.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: gather(whole, part),
            "reduce_scatter": lambda: reduce_scatter(part, whole),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "reduce": lambda: dist.reduce(whole, 0),
            "gather": lambda: dist.gather(part, parts, 0),
            "scatter": lambda: dist.scatter(part, parts, 0),
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
        }[operation]
