"""The lanes of a run: what their rows follow from, and the lanes that this process reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.corpus import share_of
from mpitrain.job.data.remarks import Remark, say_remark
from mpitrain.job.data.streaming.feed import Cursor, Feed, Tolerance
from mpitrain.job.data.streaming.fetching import FetchAhead
from mpitrain.job.data.streaming.mixture import Mixture, Points
from mpitrain.job.data.streaming.packing import CutRows, PackedRow, Packing, WholeRows
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.tokenizers import Tokenizer

NUM_INTEGERS = 4
"""The state of a lane in a source, see feed.py."""

_NUM_MIXED = 64  # rows of each lane in a batch, mostly 1


@dataclass(frozen=True)
class Recipe:
    """All that the rows of the lanes follow from. A tokenizing process gets a pickle of it.

    ValueError if `batch` is no multiple of `lanes`.
    """

    sources: tuple[DocumentSource, ...]
    weights: tuple[Points, ...]
    """Of each source, see Mixture."""
    lanes: int
    """The number of lanes, a divisor of `batch`."""
    batch: int
    """Rows of a global batch."""
    context: int
    """Tokens of a row that the model sees."""
    seed: int
    packing: Packing
    cache: ShardCache
    """For shards that are remote or compressed."""
    tokenizer: Tokenizer
    share: tuple[float, float] = (0.0, 1.0)
    """The documents of these sources: those with keys of which the share (`corpus.share_of`) is in this interval."""
    max_damaged: int = 0
    """The damaged documents that are tolerated."""

    def __post_init__(self) -> None:
        rows_per_lane(self.lanes, self.batch)

    @property
    def per_lane(self) -> int:
        """The rows of a lane in a batch."""
        return self.batch // self.lanes

    def feeds(self, say: Callable[[Remark], object] | None = None) -> list[Feed]:
        """The documents of each source. `say`: see Feed."""
        begin, end = self.share
        keeps = None if self.share == (0.0, 1.0) else (lambda key: begin <= share_of(key) < end)
        return [
            Feed(
                source.name, source.shards, source.sequence(self.seed), self.tokenizer.document,
                field=source.field, keeps=keeps, local=self.cache.local, say=say,
            )
            for source in self.sources
        ]  # fmt: skip

    def check(self) -> None:
        """ValueError if a source has no document, or no weight is above 0. It opens shards until it has found documents."""
        self.mixture()
        for feed in self.feeds():
            feed.check()

    def mixture(self) -> Mixture:
        """Which source each row comes from."""
        return Mixture(self.weights, seed=self.seed, lanes=self.lanes, per_lane=self.per_lane)

    def sources_of(self, numbers: Sequence[int], rows: Sequence[int]) -> np.ndarray:
        """The number of the source of each of some rows of a batch in which each lane makes its rows with these `numbers`."""
        mixture, its = self.mixture(), np.asarray(rows, np.int64)
        found = np.stack([mixture.sources(number, its // self.per_lane) for number in numbers])
        return np.asarray(found[its % self.per_lane, np.arange(len(its))])


class Lane(Protocol):
    """A lane that this rank reads."""

    num_rows: int
    """Made so far."""

    def next(self) -> PackedRow:
        """The next row. Errors: see `Stream.get`."""

    def states(self) -> np.ndarray:
        """The state in each source: int64 of shape (sources, 4)."""


class OpenLanes(Protocol):
    """Opens lanes with `numbers` after `first` rows of each. `states`: of all lanes, int64 of shape (lanes, sources, 4)."""

    def __call__(self, numbers: Sequence[int], first: int, states: np.ndarray) -> Mapping[int, Lane]: ...


def open_lanes(
    recipe: Recipe,
    say: Callable[[str], object],
    *,
    fetches_ahead: bool = True,
    remark: Callable[[Remark], object] = say_remark,
) -> OpenLanes:
    """Lanes that this process reads. `say` gets a line about each damaged document, `remark` what users should know of the shards.

    `fetches_ahead`: see FetchAhead.
    """

    def opened(numbers: Sequence[int], first: int, states: np.ndarray) -> Mapping[int, Lane]:
        feeds, mixture = recipe.feeds(remark), recipe.mixture()
        # The lanes make rows of the same numbers at about the same time: one permutation serves them all.
        mixed: Callable[[int], Sequence[int]] = lru_cache(_NUM_MIXED)(
            lambda row: mixture.sources(row, np.arange(recipe.lanes)).tolist()
        )
        tolerance, ahead = Tolerance(recipe.max_damaged, say), FetchAhead(recipe.cache, is_on=fetches_ahead)
        return {
            number: _LaneHere(
                [
                    Cursor(feed, state, recipe.lanes, tolerance, ahead)
                    for feed, state in zip(feeds, states[number].copy(), strict=True)
                ],
                mixed,
                number,
                first,
                recipe,
            )
            for number in numbers
        }

    return opened


class _LaneHere:
    """A lane that this process reads. `mixed`: the source of a row of each lane."""

    def __init__(
        self,
        cursors: Sequence[Cursor],
        mixed: Callable[[int], Sequence[int]],
        number: int,
        num_rows: int,
        recipe: Recipe,
    ) -> None:
        self.num_rows = num_rows
        self._cursors, self._mixed, self._number = cursors, mixed, number
        length = recipe.context + 1
        self._packers = [
            CutRows(cursor, length) if recipe.packing == "cut" else WholeRows(cursor, length, seed=recipe.seed)
            for cursor in cursors
        ]

    def next(self) -> PackedRow:
        row = self._packers[self._mixed(self.num_rows)[self._number]].next()
        self.num_rows += 1
        return row

    def states(self) -> np.ndarray:
        return np.array([cursor.state for cursor in self._cursors])


def rows_per_lane(lanes: int, batch: int) -> int:
    """The rows of each lane in a batch. ValueError if they differ."""
    if lanes < 1 or batch % lanes:
        raise ValueError(f"train.batch: expected a multiple of the run's {lanes} lanes (data.lanes), got {batch}")
    return batch // lanes
