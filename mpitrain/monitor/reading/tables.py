"""Figures of steps as arrays: a column for each name, and NaN where a line has no value.

A step that has two lines (it was done again after a crash) has the values of the last one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Table(NamedTuple):
    """Figures of n steps, in order of step."""

    step: Array
    """(n,) int64, growing."""
    columns: dict[str, Array]
    """(n,) float64 each; of ranks (n, ranks) float32, and of summaries (n, 4) float32. NaN: no value."""

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> Array:
        """The column of this name; NaN everywhere if there is none."""
        found = self.columns.get(name)
        return np.full(len(self.step), np.nan) if found is None else found


class TableBuilder:
    """Makes a table of blocks of lines. Figures that are no numbers are left out."""

    def __init__(self, *, of_lists: bool = False) -> None:
        """`of_lists`: each figure is a list of numbers, such as one for each rank. Lists may have several lengths."""
        self._of_lists = of_lists
        self._steps: list[Array] = []
        self._columns: dict[str, list[tuple[int, Array]]] = {}  # (number of the block, its values)

    def add(self, steps: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
        """Add a block: a step and its figures for each row."""
        if not steps:
            return
        block = len(self._steps)
        self._steps.append(np.array(steps, np.int64))
        kinds_of_row = dict.fromkeys(map(tuple, rows))  # few, so that not each row's names are looked at
        for name in dict.fromkeys(name for names in kinds_of_row for name in names):
            values = [row.get(name) for row in rows]
            found = _of_lists(values) if self._of_lists else _of_numbers(values)
            if found is not None:
                self._columns.setdefault(name, []).append((block, found))

    def table(self) -> Table:
        """The table of all blocks."""
        if not self._steps:
            return Table(np.zeros(0, np.int64), {})
        begins = np.cumsum([0, *map(len, self._steps)])
        step = np.concatenate(self._steps)
        order = _last_of_each(step)
        columns = {}
        for name, blocks in self._columns.items():
            column = np.full((len(step), *max(values.shape[1:] for _, values in blocks)), np.nan, blocks[0][1].dtype)
            for at, values in blocks:
                rows = column[begins[at] : begins[at + 1]]
                rows[(..., slice(values.shape[-1])) if self._of_lists else ...] = values
            columns[name] = column if order is None else column[order]
        return Table(step if order is None else step[order], columns)


def _of_numbers(values: list[Any]) -> Array | None:
    """(n,) float64, NaN for None; None if there is anything but numbers."""
    try:
        found = np.array(values, np.float64)
    except (ValueError, TypeError):
        return None
    return found if found.ndim == 1 else None


def _of_lists(values: list[Any]) -> Array | None:
    """(n, most) float32, NaN for None and behind the end of a shorter list; None if there is anything but lists of numbers."""
    try:
        found = np.array(values, np.float32)
        return found if found.ndim == 2 else None
    except (ValueError, TypeError):
        pass
    if not all(value is None or isinstance(value, list) for value in values):
        return None
    found = np.full((len(values), max(len(value or ()) for value in values)), np.nan, np.float32)
    try:
        for row, value in zip(found, values, strict=True):
            row[: len(value or ())] = value or ()
    except (ValueError, TypeError):
        return None
    return found


def _last_of_each(step: Array) -> Array | None:
    """The last row of each step, in order of step; None if these are all rows as they are."""
    if (np.diff(step) > 0).all():
        return None
    _, first_from_behind = np.unique(step[::-1], return_index=True)
    last: Array = len(step) - 1 - first_from_behind
    return last
