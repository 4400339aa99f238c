"""The rows of a rank, from its lanes, and the state of the lanes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpitrain.job.data.streaming.feed import CHUNK, DAMAGED
from mpitrain.job.data.streaming.lanes import NUM_INTEGERS, Lane, OpenLanes, Recipe


@dataclass(frozen=True)
class TokenRows:
    """Rows of a global batch: tokens and segments (see packing.py), int32 of shape (rows, context + 1).

    `is_whole`: documents are whole, so that the first token of one is no target after the last one of another.
    """

    tokens: np.ndarray
    segments: np.ndarray
    is_whole: bool

    def __getitem__(self, rows: slice) -> "TokenRows":
        """Some of the rows."""
        return TokenRows(self.tokens[rows], self.segments[rows], self.is_whole)


class LaneStates(NamedTuple):
    """The states of some lanes. `lanes`: their numbers, in increasing order. `states`: int64 of shape (lanes, sources, 4)."""

    lanes: list[int]
    states: np.ndarray

    @property
    def num_damaged(self) -> int:
        """The damaged documents so far."""
        return int(self.states[..., DAMAGED].sum())

    def pieces(self) -> list[tuple[int, np.ndarray]]:
        """The number of the first of each group of neighbours, and the states of the group."""
        gaps = np.flatnonzero(np.diff(self.lanes) != 1) + 1
        begins = [0, *gaps.tolist()] if self.lanes else []
        return [(self.lanes[begin], states) for begin, states in zip(begins, np.split(self.states, gaps), strict=False)]


class Stream:
    """The stream of a run's rows, of which each rank makes its own.

    Row r of a batch belongs to lane r // (batch // lanes). The rows of a lane come in order: the lane also makes rows that other ranks
    have, and rows that the run leaves out. A rank asks for the same rows of each batch, in increasing order.

    `open_lanes`: opens the lanes of `recipe`, in this process or in others.
    """

    def __init__(self, recipe: Recipe, open_lanes: OpenLanes) -> None:
        self._recipe, self._open_lanes = recipe, open_lanes
        self._first = 0  # the rows that each lane has made before `_states`
        self._states = np.zeros((recipe.lanes, len(recipe.sources), NUM_INTEGERS), np.int64)
        self._states[:, :, CHUNK] = np.arange(recipe.lanes)[:, None]  # lane n begins with chunk n
        self._opened: Mapping[int, Lane] = {}

    def get(self, numbers: Sequence[int], rows: Sequence[int]) -> TokenRows:
        """Rows of a batch in which each lane makes its rows with these `numbers`. A rank asks for batches in order.

        Raises:
            ValueError: rows that this rank has made already, or too many damaged documents.
            DamagedShardError, OSError: a shard cannot be read.
        """
        per_lane = self._recipe.per_lane
        made = [self._lane_after(row // per_lane, numbers[row % per_lane], rows).next() for row in rows]
        shape = (len(rows), self._recipe.context + 1)
        tokens = np.array([row.tokens for row in made], np.int32).reshape(shape)
        segments = np.array([row.segments for row in made], np.int32).reshape(shape)
        return TokenRows(tokens, segments, self._recipe.packing == "whole")

    def state(self, num_rows: int, rows: Sequence[int]) -> LaneStates:
        """The states, after `num_rows` rows of each lane, of the lanes of which the last row of a batch is one of `rows`.

        These are the rows that this rank makes of each batch.
        """
        per_lane = self._recipe.per_lane
        own = [row // per_lane for row in rows if row % per_lane == per_lane - 1]
        states = [self._lane_after(lane, num_rows, rows).states() for lane in own]
        return LaneStates(own, np.array(states, np.int64).reshape(-1, *self._states.shape[1:]))

    def load(self, num_rows: int, states: np.ndarray) -> None:
        """Go on after `num_rows` rows of each lane, with the states of all lanes. ValueError if they are of other lanes or sources."""
        if states.shape != self._states.shape:
            there, here = states.shape, self._states.shape
            raise ValueError(
                f"data: the checkpoint has {there[0]} lanes and {there[1]} sources, and this run {here[0]} and {here[1]}: "
                "start with the same data.sources and data.lanes, or another run with --run"
            )
        self._first, self._states = num_rows, np.array(states, np.int64)
        self._opened = {}

    def _lane_after(self, number: int, num_rows: int, rows: Sequence[int]) -> Lane:
        """A lane that has made so many rows. It is one of those that `rows` belong to."""
        if not self._opened:
            numbers = sorted({row // self._recipe.per_lane for row in rows})
            self._opened = self._open_lanes(numbers, self._first, self._states)
        lane = self._opened[number]
        if lane.num_rows > num_rows:
            raise ValueError(
                f"lane {number} has made {lane.num_rows} rows; expected {num_rows} or less, or a call of `load`"
            )
        while lane.num_rows < num_rows:
            lane.next()
        return lane
