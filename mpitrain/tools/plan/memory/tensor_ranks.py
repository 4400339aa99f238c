"""One rank of a tensor-parallel group, without the others: cuts a model, and counts the memory that the ranks of the group share.

The cut model runs the real code of `tensor/` on tensors without memory. Here are stand-ins for what this code needs of other ranks.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from collectives import Communicator
from mpitrain.models import LanguageModel
from mpitrain.tensor import tensor_parallel
from mpitrain.tensor.exchange import Exchange
from mpitrain.tensor.layers import TensorRanks
from mpitrain.tensor.node_arrays import MAX_ARRAYS, ArraySizes
from mpitrain.tools.plan.memory.tracker import Tracker


class TensorRank(NamedTuple):
    """A rank of a tensor-parallel group: its number, the size of the group, and whether the group is on one node."""

    rank: int
    size: int
    is_on_one_node: bool


def cut(model: LanguageModel, of: TensorRank, *, sequence: bool) -> TensorRanks | None:
    """Cut a model as the main job does on one rank of a group; returns the group as the model's modules see it, None for one rank.

    Parameters on the meta device, or of a `FakeTensorMode`. The model computes as in evaluation, without random numbers.
    """
    if of.size == 1:
        return None
    plan = model.tensor_plan.values()
    sharing = {of.size // style.blocks for style in plan if style.is_shared and style.blocks} - {0, 1}
    comm = _Alone(of.rank, of.size, num_sharing=next(iter(sharing), 1))
    tensor_parallel(model, cast(Communicator, comm), sequence=sequence)
    model.eval()
    found = (getattr(module, "ranks", None) for module in model.modules())
    return next(ranks for ranks in found if isinstance(ranks, TensorRanks))


class SharedActivations:
    """The node arrays of one rank's exchanges, over several runs of the model: arrays stay until the end of the job."""

    def __init__(self, of: TensorRank) -> None:
        self._of = of
        self._arrays = _Arrays() if of.is_on_one_node else None

    def take_part(self, ranks: TensorRanks, tracker: Tracker) -> None:
        """Let a model's exchanges use these arrays, and count other memory in `tracker`."""
        ranks.exchange = Exchange(ranks.comm, self._arrays)
        if self._arrays is not None:
            self._arrays.tracker = tracker

    @property
    def nbytes(self) -> int:
        """This rank's share of the arrays: of memory that N ranks share 1/N."""
        return 0 if self._arrays is None else int(self._arrays.used.sum()) // self._of.size


class _Alone:
    """What `tensor_parallel` and the exchanges need of a Communicator. Collectives return at once: only shapes count."""

    num_nodes = 2  # so that an Exchange makes no arrays itself

    def __init__(self, rank: int, size: int, *, num_sharing: int = 1) -> None:
        self.rank, self.size, self._num_sharing = rank, size, num_sharing

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def split(self, color: int) -> "_Alone":
        """The neighbours that have one block together, such as a head of keys: the only groups within a group."""
        return _Alone(self.rank % self._num_sharing, self._num_sharing)

    def all_reduce(self, x: Any) -> Any:
        return x

    def broadcast(self, x: Any) -> Any:
        return x

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size

    def all_gather(self, out: Any, x: Any, counts: Any = None) -> Any:
        return out

    def reduce_scatter(self, out: Any, x: Any, counts: Any = None) -> Any:
        return out


class _Ended:
    def wait(self) -> None:
        pass


class _Arrays:
    """In the place of `NodeArrays`: chooses as it does, and gives tensors without memory.

    All ranks let go of an array at the same time.
    """

    def __init__(self) -> None:
        self._sizes = ArraySizes()
        self._is_let_go, self._was_let_go = (
            np.zeros(MAX_ARRAYS, np.bool_) for _ in range(2)
        )  # now, and before the last fence
        self.used = np.zeros(MAX_ARRAYS, np.int64)
        """The most bytes of each array that tensors have used."""
        self.tracker: Tracker | None = None

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        nbytes, count = prod(shape) * dtype.itemsize, self._sizes.count
        choice = self._sizes.choose(nbytes, (self._was_let_go & self._is_let_go)[:count])
        if choice is None or self.tracker is None:
            return None
        if choice.new_bytes:
            self._sizes.change(choice)
        number = choice.number
        self._is_let_go[number] = False
        self.used[number] = max(self.used[number], nbytes)
        tensor = self.tracker.uncounted(lambda: torch.empty(tuple(shape), dtype=dtype))
        weakref.finalize(tensor.untyped_storage(), self._let_go, number)
        return tensor

    def fence(self) -> "_Ended":
        self._was_let_go[:] = self._is_let_go
        return _Ended()

    def _let_go(self, number: int) -> None:
        self._is_let_go[number] = True
