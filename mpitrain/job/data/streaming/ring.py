"""Rows and states in memory that a rank shares with a tokenizing process."""

import mmap
import os

import numpy as np

from mpitrain.job.data.streaming.lanes import NUM_INTEGERS, Recipe
from mpitrain.job.data.streaming.packing import PackedRow


class Ring:
    """Slots in the file `fd`, which each side maps. A slot has a row, and the states of its lane after it.

    The two sides tell each other which slots are full and free.
    """

    def __init__(self, fd: int, num_slots: int, recipe: Recipe) -> None:
        row, states = (np.int32, (recipe.context + 1,)), (np.int64, (len(recipe.sources), NUM_INTEGERS))
        slot = np.dtype([("states", *states), ("tokens", *row), ("segments", *row)], align=True)
        os.ftruncate(fd, num_slots * slot.itemsize)
        self._slots = np.frombuffer(mmap.mmap(fd, num_slots * slot.itemsize), slot)

    def put(self, number: int, row: PackedRow, states: np.ndarray) -> None:
        """Fill the slot of the row with this number, counted from 0."""
        slot = self._slots[number % len(self._slots)]
        slot["tokens"], slot["segments"], slot["states"] = row.tokens, row.segments, states

    def take(self, number: int) -> tuple[PackedRow, np.ndarray]:
        """A copy of the row with this number, and of the states after it."""
        slot = self._slots[number % len(self._slots)]
        return PackedRow(slot["tokens"].copy(), slot["segments"].copy()), slot["states"].copy()
