"""Figures of steps as arrays: a column for each name, and NaN where a line has no value.

A step that has two lines (it was done again after a crash) has the values of the last one.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.texts import shown

Array = npt.NDArray[Any]
_MOST_NAME = 1000
_FREE_BYTES, _CELLS_FOR_ONE = 64_000_000, {False: 16, True: 8}
"""A table may have so many bytes, and so many cells more for each figure of its lines (True: of lists). Lines of a run have nearly the
same names, and lists of nearly one length; those of a stranger could ask for more memory than there is."""


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

    def __init__(self, *, of_lists: bool = False, most_names: int = 10_000) -> None:
        """`of_lists`: each figure is a list of numbers, such as one for each rank. Lists may have several lengths.

        `most_names`: the largest number of different figures.
        """
        self._of_lists, self._most_names = of_lists, most_names
        self._steps: list[Array] = []
        self._columns: dict[str, list[tuple[int, Array]]] = {}  # (number of the block, its values)
        self._num_figures = 0

    def add(self, steps: Sequence[int], rows: Sequence[dict[str, Any]]) -> None:
        """Add a block: a step and its figures for each row. ValueError for too many names, or if the rows have too little in common."""
        if not steps:
            return
        self._num_figures += sum(sum(map(len, row.values())) for row in rows) if self._of_lists else sum(map(len, rows))
        block = len(self._steps)
        self._steps.append(np.array(steps, np.int64))
        kinds_of_row = dict.fromkeys(map(tuple, rows))  # few, so that not each row's names are looked at
        names = dict.fromkeys(name for names in kinds_of_row for name in names)
        if len(names | self._columns) > self._most_names:
            raise ValueError(f"its lines have figures of more than {self._most_names:,} names")
        self._check(len(rows) * len(names) * self._longest(rows))
        for name in names:
            values = [row.get(name) for row in rows]
            found = _of_lists(values) if self._of_lists else _of_numbers(values)
            if found is not None:
                self._columns.setdefault(name, []).append((block, found))

    def _longest(self, rows: Sequence[dict[str, Any]]) -> int:
        return max((len(its) for row in rows for its in row.values()), default=0) if self._of_lists else 1

    def _check(self, num_cells: int) -> None:
        if num_cells > _FREE_BYTES // (4 if self._of_lists else 8) + _CELLS_FOR_ONE[self._of_lists] * self._num_figures:
            raise ValueError("its lines have too little in common for a table: other names, or lists of other lengths")

    def table(self) -> Table:
        """The table of all blocks. ValueError: see `add`."""
        if not self._steps:
            return Table(np.zeros(0, np.int64), {})
        begins = np.cumsum([0, *map(len, self._steps)])
        # All columns of ranks have one width: they are added and compared.
        shape = max((values.shape[1:] for blocks in self._columns.values() for _, values in blocks), default=())
        self._check(int(begins[-1]) * len(self._columns) * math.prod(shape))
        step = np.concatenate(self._steps)
        order = _last_of_each(step)
        columns = {}
        for name, blocks in self._columns.items():
            column = np.full((len(step), *shape), np.nan, blocks[0][1].dtype)
            for at, values in blocks:
                rows = column[begins[at] : begins[at + 1]]
                rows[(..., slice(values.shape[-1])) if self._of_lists else ...] = values
            columns[shown(name)[:_MOST_NAME]] = column if order is None else column[order]
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
