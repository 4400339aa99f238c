"""Plans: the checked arguments and the chosen algorithm of a call, kept for the next call with the same arrays.

Training calls the same collectives on the same arrays in every step. With a plan only the call of the transport is left to do. Without
plans a call of 1 KiB takes 4 to 9 us more if its code and data are in the core's cache, and three times as much if the caller's own
work has displaced them: more than a small collective takes.

A plan is found by the address, length and dtype of the arrays, never by the array object, because tensors can change their storage.
All plans are dropped when the process maps or unmaps node memory, of any communicator, and when the table changes: the kind of memory
and the table decide the algorithm, and all ranks must choose the same one.
"""

import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

MAX_PLANS = 1 << 10


class Plan(NamedTuple):
    """`call(*arguments)` runs the collective; `entered`: the arguments of its entry in the flight record."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    entered: tuple[Any, ...]


def key_of(x: Any) -> Hashable:
    """The address, length and dtype of a NumPy array or a torch tensor in host memory, and whether an array is read-only.

    Two arrays with the same key are equal for a collective: contiguous, with the same elements of the same memory. None if `x` is
    not contiguous or not an array of these libraries."""
    if type(x) is np.ndarray:
        try:
            memory = sys.modules["mpi4py.MPI"].memory(x)
        except (BufferError, ValueError, TypeError):
            return None  # not contiguous, or a dtype that the buffer protocol cannot describe
        return memory.address, memory.nbytes, x.dtype, memory.readonly
    torch = sys.modules.get("torch")
    if torch is not None and type(x) is torch.Tensor:
        try:
            # A tensor in GPU memory gets a key, but never a plan (`Dispatch.keep_plan`), and its address is no host array's.
            # Buffer refuses lazily negated views, which torch negates when it reads them.
            return (x.data_ptr(), x.numel(), x.dtype) if x.is_contiguous() and not x.is_neg() else None
        except RuntimeError:
            return None  # sparse
    return None


class Plans(dict[Hashable, Plan]):
    """The plans of one communicator, by the key of the call."""

    def keep(self, key: Hashable, plan: Plan) -> None:
        """Add a plan. If there are MAX_PLANS, the oldest is dropped."""
        if len(self) >= MAX_PLANS:
            self.pop(next(iter(self), None), None)  # another thread may have dropped all
        self[key] = plan

    def forget(self) -> None:
        """Drop all plans."""
        self.clear()
