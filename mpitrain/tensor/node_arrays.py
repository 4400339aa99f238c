"""Arrays for activations in the memory that the ranks of a node share. An array is used again when no rank needs it any more.

A new array takes milliseconds, and a step needs many, so the arrays stay. All ranks must take the same array for the same activation,
without a message about it. A rank notes in shared memory when the last tensor on an array is gone. Rank 0 lists the arrays that all
ranks have let go, before it enters a fence. After the fence all ranks choose from this list by one rule.

[Note: when an array is free] A rank holds each array from before a fence until after it. So the list that rank 0 makes before the fence
has no array that another rank is about to take for this fence: rank 0 holds it, too. There are two lists in turn: rank 0 changes a list
only after the next fence, when all ranks have chosen from it.
"""

import os
import weakref
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from collectives import Communicator, Work

MAX_ARRAYS = 1 << 14


class ArrayChoice(NamedTuple):
    """The array of a new tensor: its number, and the bytes of a new array in this place; 0 if the present one is large enough."""

    number: int
    new_bytes: int


class ArraySizes:
    """The sizes of the arrays, and the rule by which all ranks choose the next one. Pure arithmetic."""

    def __init__(self) -> None:
        self._sizes = np.zeros(MAX_ARRAYS, np.int64)
        self.count = 0

    def choose(self, nbytes: int, is_free: np.ndarray) -> ArrayChoice | None:
        """The smallest free array that is large enough, or else a new one. `is_free`: (count,) bool. None if there are too many."""
        if self.count == MAX_ARRAYS:
            return None
        sizes = self._sizes[: self.count]
        fitting = np.flatnonzero(is_free & (sizes >= nbytes))
        if len(fitting):
            return ArrayChoice(int(fitting[sizes[fitting].argmin()]), 0)
        # The largest free array makes room for the new one: then sequences of many lengths do not need memory for all of them.
        others = np.flatnonzero(is_free)
        number = int(others[sizes[others].argmax()]) if len(others) else self.count
        step = max(1 << max(nbytes.bit_length() - 3, 0), 4096)
        return ArrayChoice(number, -(-max(nbytes, 1) // step) * step)

    def change(self, choice: ArrayChoice) -> None:
        """There is a new array in the chosen place."""
        self._sizes[choice.number] = choice.new_bytes
        self.count = max(self.count, choice.number + 1)


class NodeArrays:
    """The arrays of the ranks of `comm`, all on one node. Collective."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._arrays: list[np.ndarray] = []
        self._sizes = ArraySizes()
        self._is_let_go: np.ndarray = comm.shared((comm.size, MAX_ARRAYS), np.bool_, or_anonymous=True)
        self._lists: np.ndarray = comm.shared((2, MAX_ARRAYS), np.bool_, or_anonymous=True)
        self._num_fences = 0
        self._fence: Work | None = None  # the last one

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor in memory that all ranks share, with any values. Collective; waits for the last fence.

        The ranks must pass a fence before one reads what another has written. None on all ranks if there is no memory.
        """
        self._wait()
        nbytes = prod(shape) * dtype.itemsize
        number = self._choose(nbytes)
        if number is None:
            return None
        self._is_let_go[self._comm.rank, number] = False
        memory = self._arrays[number][:nbytes]  # a new object, which lives as long as the tensors on it
        weakref.finalize(memory, _let_go, os.getpid(), self._is_let_go, (self._comm.rank, number)).atexit = False
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def fence(self) -> Work:
        """Enter a fence; `wait()` returns when all ranks have entered it. Collective; waits for the fence before it."""
        self._wait()
        self._num_fences += 1
        count = len(self._arrays)
        if self._comm.rank == 0:
            self._list[:count] = self._is_let_go[:, :count].all(0)
        self._fence = self._comm.barrier(async_op=True)
        return self._fence

    def _wait(self) -> None:
        if self._fence is not None:
            self._fence.wait()
            self._fence = None

    @property
    def _list(self) -> np.ndarray:
        """Which arrays all ranks had let go before the last fence."""
        return self._lists[self._num_fences % 2]

    def _choose(self, nbytes: int) -> int | None:
        """The number of an array of at least `nbytes`."""
        count = self._sizes.count
        choice = self._sizes.choose(nbytes, self._list[:count] & self._is_let_go[self._comm.rank, :count])
        if choice is None:
            return None
        if choice.new_bytes:
            try:
                array = self._comm.shared(choice.new_bytes, np.uint8, or_anonymous=True)
            except OSError:
                return None
            self._arrays[choice.number : choice.number + 1] = [array]
            self._sizes.change(choice)
        return choice.number


def _let_go(process: int, is_let_go: np.ndarray, place: tuple[int, int]) -> None:
    if os.getpid() == process:  # a forked process, such as a worker that loads data, has copies of the tensors
        is_let_go[place] = True
