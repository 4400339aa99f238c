"""The rows of a rank: its lanes, and the state of all lanes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpitrain.data.streaming.feed import CHUNK, DAMAGED, Cursor, Feed, Tolerance
from mpitrain.data.streaming.mixture import Mixture
from mpitrain.data.streaming.packing import CutRows, Packing, Row, WholeRows

NUM_INTEGERS = 4
"""The state of a lane in a source, see feed.py."""

_NUM_MIXED = 64  # rows of each lane in a batch, mostly 1


class Rows(NamedTuple):
    """Rows of a global batch: tokens and segments (see packing.py), int32 of shape (rows, context + 1).

    `is_whole`: documents are whole, so that the first token of one is no target after the last one of another.
    """

    tokens: np.ndarray
    segments: np.ndarray
    is_whole: bool


class Stream:
    """The stream of a run's rows, of which each rank makes its own.

    Row r of a batch belongs to lane r // (batch // lanes). The rows of a lane come in order: the lane also makes rows that other ranks
    have, and rows that the run leaves out.

    Args:
        feeds: the sources.
        mixture: which source a row comes from.
        lanes: the number of lanes, a divisor of `batch`.
        batch: rows of a global batch.
        context: tokens that the model sees.
        seed: the run's seed.
        packing: how documents fill rows.
        tolerance: what happens to damaged documents.

    Raises:
        ValueError: `batch` is no multiple of `lanes`, or a source has no document.
    """

    def __init__(
        self,
        feeds: Sequence[Feed],
        mixture: Mixture,
        *,
        lanes: int,
        batch: int,
        context: int,
        seed: int,
        packing: Packing = "cut",
        tolerance: Tolerance,
    ) -> None:
        self.per_lane = rows_per_lane(lanes, batch)
        for feed in feeds:
            feed.check()
        self._feeds, self._seed, self._packing, self._tolerance = feeds, seed, packing, tolerance
        # The lanes make rows of the same numbers at about the same time: one permutation serves them all.
        self._sources = lru_cache(_NUM_MIXED)(lambda row: mixture.sources(row, np.arange(lanes)).tolist())
        self.lanes, self.batch, self.context = lanes, batch, context
        self._begin = 0  # the rows that each lane has made before `_states`
        self._states = np.zeros((lanes, len(feeds), NUM_INTEGERS), np.int64)
        self._states[:, :, CHUNK] = np.arange(lanes)[:, None]  # lane n begins with chunk n
        self._active: dict[int, _Lane] = {}

    def get(self, numbers: Sequence[int], lo: int, hi: int) -> Rows:
        """Rows lo to hi of a batch in which each lane makes its rows with these `numbers`. A rank asks for its rows in order.

        Raises:
            ValueError: rows that this rank has made already, or too many damaged documents.
            DamagedShardError, OSError: a shard cannot be read.
        """
        made = [self._row(row // self.per_lane, numbers[row % self.per_lane]) for row in range(lo, hi)]
        shape = (hi - lo, self.context + 1)
        tokens = np.array([row.tokens for row in made], np.int32).reshape(shape)
        segments = np.array([row.segments for row in made], np.int32).reshape(shape)
        return Rows(tokens, segments, self._packing == "whole")

    def state(self, first: int, lo: int, hi: int) -> tuple[int, np.ndarray]:
        """The states, after `first` rows of each lane, of the lanes of which the last row of a batch is one of lo to hi.

        Returns the number of the first such lane, and the states: int64 of shape (lanes, sources, 4). The rows lo to hi are those that
        this rank makes of each batch.
        """
        own = self._own(lo, hi)
        states = [self._lane_after(lane, first).states() for lane in own]
        return own.start, np.array(states, np.int64).reshape(-1, len(self._feeds), NUM_INTEGERS)

    def num_damaged(self, lo: int, hi: int) -> int:
        """The damaged documents so far in these lanes."""
        return sum(int(state[DAMAGED]) for lane in self._own(lo, hi) for state in self._lane(lane).states())

    def load(self, first: int, states: np.ndarray) -> None:
        """Go on after `first` rows of each lane, with the states of all lanes. ValueError if they are of other lanes or sources."""
        if states.shape != self._states.shape:
            there, here = states.shape, self._states.shape
            raise ValueError(
                f"data: the checkpoint has {there[0]} lanes and {there[1]} sources, and this run {here[0]} and {here[1]}: "
                "start with the same data.sources and data.lanes, or another run with --run"
            )
        self._begin, self._states = first, np.array(states, np.int64)
        self._active.clear()

    def _own(self, lo: int, hi: int) -> range:
        """The lanes of which the last row of a batch is one of lo to hi."""
        return range(-(-(lo + 1) // self.per_lane) - 1, hi // self.per_lane)

    def _lane(self, number: int) -> "_Lane":
        if number not in self._active:
            cursors = [
                Cursor(feed, state, self.lanes, self._tolerance)
                for feed, state in zip(self._feeds, self._states[number].copy(), strict=True)
            ]
            self._active[number] = _Lane(cursors, self._begin, self.context + 1, self._packing, self._seed)
        return self._active[number]

    def _lane_after(self, number: int, num_rows: int) -> "_Lane":
        """A lane that has made so many rows."""
        lane = self._lane(number)
        if lane.num_rows > num_rows:
            raise ValueError(
                f"lane {number} has made {lane.num_rows} rows; expected {num_rows} or less, or a call of `load`"
            )
        while lane.num_rows < num_rows:
            lane.next(self._sources(lane.num_rows)[number])
        return lane

    def _row(self, lane: int, number: int) -> Row:
        return self._lane_after(lane, number).next(self._sources(number)[lane])


def rows_per_lane(lanes: int, batch: int) -> int:
    """The rows of each lane in a batch. ValueError if they differ."""
    if lanes < 1 or batch % lanes:
        raise ValueError(f"train.batch: expected a multiple of the run's {lanes} lanes (data.lanes), got {batch}")
    return batch // lanes


class _Lane:
    """A lane that this rank reads."""

    def __init__(self, cursors: Sequence[Cursor], num_rows: int, length: int, packing: Packing, seed: int) -> None:
        self.num_rows = num_rows  # made so far
        self._cursors = cursors
        self._packers = [
            CutRows(cursor, length) if packing == "cut" else WholeRows(cursor, length, seed=seed) for cursor in cursors
        ]

    def next(self, source: int) -> Row:
        """The next row, of this source."""
        self.num_rows += 1
        return self._packers[source].next()

    def states(self) -> list[np.ndarray]:
        """The states of the sources."""
        return [cursor.state for cursor in self._cursors]
