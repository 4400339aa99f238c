"""Calls that were made before: what was checked and chosen for them, kept for the next call with the same arrays.

Without plans a call of 1 KiB takes 4 to 9 us more when it runs out of the core's cache, and three times as many after the caller's
own work has filled that with data: more than a small collective takes. Training calls the same collectives on the same arrays in
every step, so for the MPI library's own collectives, which "auto" takes for small arrays, only the call itself is left to do.

A plan is found by where the arrays lie, their length and dtype, never by the object: tensors change their storage. All plans are
forgotten when node memory is mapped or unmapped, and when the table changes: private or node memory decides the algorithm, and all
ranks must come to the same one.
"""

import sys
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

MAX_PLANS = 1 << 10


class Plan(NamedTuple):
    """`call(*arguments)` is the collective; `entered`: what the flight record says of it."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    entered: tuple[Any, ...]


def key_of(x: Any) -> Hashable:
    """Where a NumPy array or a torch tensor in host memory lies, its length and dtype, whether it is read-only. None: it has no key.

    Two arrays of the same key are alike for a collective: contiguous, the same elements of the same memory.
    """
    if type(x) is np.ndarray:
        try:
            memory = sys.modules["mpi4py.MPI"].memory(x)
        except (BufferError, ValueError, TypeError):
            return None  # not contiguous, or a dtype that the buffer protocol has no word for
        return memory.address, memory.nbytes, x.dtype, memory.readonly
    torch = sys.modules.get("torch")
    if torch is not None and type(x) is torch.Tensor:
        try:
            # one in GPU memory has no plan, and lies where no host array can
            # (torch's views that are to be negated when read are refused elsewhere)
            return (x.data_ptr(), x.numel(), x.dtype) if x.is_contiguous() and not x.is_neg() else None
        except RuntimeError:
            return None  # sparse
    return None


class Plans(dict[Hashable, Plan]):
    """The plans of one communicator, by the call that they are for."""

    def keep(self, key: Hashable, plan: Plan) -> None:
        """The oldest goes when there are too many."""
        if len(self) >= MAX_PLANS:
            del self[next(iter(self))]
        self[key] = plan

    def forget(self) -> None:
        """All of them."""
        self.clear()
