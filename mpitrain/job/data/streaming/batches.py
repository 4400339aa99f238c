"""Training and evaluation batches of documents, with the interface of `order.Batches` and `order.HeldoutBatches`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.job.data.documents import VERSION
from mpitrain.job.data.positions import Positions
from mpitrain.job.data.shards import unpacked
from mpitrain.job.data.streaming import earlier
from mpitrain.job.data.streaming.feed import CHUNK, AllOnOtherSideError
from mpitrain.job.data.streaming.lanes import NUM_INTEGERS, OpenLanes, Recipe, rows_per_lane
from mpitrain.job.data.streaming.saved import check
from mpitrain.job.data.streaming.stream import LaneStates, Stream, TokenRows

_MAX_PLACE = 1 << 53
_LEAST_LIST_BYTES = 64 << 20  # in memory, of a checkpoint's list of shards


class DocumentBatches(Positions):
    """Training batches of documents, without end.

    Args:
        recipe: what the rows follow from, at the begin of the run.
        open_lanes: reads the lanes of a recipe: lanes.open_lanes, or a method of processes.Processes.

    Raises:
        ValueError: a source has no document.
    """

    lacks = ""
    """As of `order.Batches`: documents follow one another again, so there are never too few of them."""

    def __init__(self, recipe: Recipe, open_lanes: Callable[[Recipe], OpenLanes]) -> None:
        super().__init__(recipe.batch)
        recipe.check()
        self._new, self._open_lanes = recipe, open_lanes
        self._begin(recipe)

    @property
    def lanes(self) -> int:
        """The number of the run's lanes."""
        return self._recipe.lanes

    def get(self, step: int, rows: Sequence[int]) -> TokenRows:
        """Rows of the global batch of a step. A rank asks for the same rows of each step, in order: see Stream."""
        return self._stream.get(self._numbers(step), rows)

    @property
    def sources(self) -> list[str]:
        """The names of the sources."""
        return [source.name for source in self._recipe.sources]

    def sources_of(self, step: int, rows: Sequence[int]) -> np.ndarray:
        """The number of the source of each of these rows, without reading them."""
        return self._recipe.sources_of(self._numbers(step), rows)

    def changed_names(self) -> dict[tuple[str, str], str]:
        """The names of shards of which the keys of documents have others than in the list, by source and path."""
        return {
            (source.name, path): name
            for source, new in zip(self._recipe.sources, self._new.sources, strict=True)
            if source.shards is not new.shards
            for path, name in zip(source.shards.paths, source.shards.names, strict=True)
        }

    def states(self, step: int, rows: Sequence[int]) -> LaneStates:
        """The states after `step` steps of this rank's lanes: see Stream.state."""
        return self._stream.state(self.next_sample(step) // self.lanes, rows)

    def described(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What the states are of: an entry of the checkpoint's meta, and the lists of shards, the same on all ranks."""
        sources, tensors = self._recipe.sources, self._lists
        if not tensors:  # once: packing 100,000 names takes 70 ms, and elastic runs copy their state every few steps
            for source in sources:
                tensors[f"shards/{source.name}"] = np.frombuffer(source.shards.packed(), np.uint8)
        listed = {name: len(packed) for name, packed in tensors.items()}
        meta = {
            "lanes": self.lanes, "order": {**self._settings(), earlier.KEY: VERSION},
            "sources": [source.meta() for source in sources], "list_bytes": listed
        }  # fmt: skip
        return meta, dict(tensors)

    def shapes(self, meta: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
        """The shapes and dtypes of the tensors of a checkpoint: `lanes`, the states of all lanes, and those of `described`.

        ValueError if the state is of other sources, or of settings with which its places would mean others; or if `meta` is none.
        """
        check(meta)
        there, here = (
            [(each["name"], each["field"]) for each in its]
            for its in (meta["sources"], [source.meta() for source in self._new.sources])
        )
        settings = {"data.sources": (there, here)} | {
            name: (meta["order"].get(name, value), value) for name, value in self._settings().items()
        }
        earlier.is_earlier(meta["order"].get(earlier.KEY, 1))
        for name, (before, now) in settings.items():
            if not _is_same(name, before, now):
                raise ValueError(
                    f"{name}: the run was saved with {before!s:.200}, got {now}: its place in the documents would be another; "
                    "take the same, or start another run with --run"
                )
        if set(meta["list_bytes"]) != (expected := {f"shards/{name}" for name, _ in here}):
            raise ValueError(
                f"data: the checkpoint's meta tells of other lists of shards than {', '.join(sorted(expected))}"
            )
        rows_per_lane(meta["lanes"], self.batch)
        lists = {name: ((int(num),), np.uint8) for name, num in meta["list_bytes"].items()}
        return {"lanes": ((meta["lanes"], len(here), NUM_INTEGERS), np.int64), **lists}

    def load(
        self,
        next_sample: int,
        meta: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray],
        rows: Sequence[int] | None = None,
    ) -> list[str]:
        """Go on with the meta and tensors of a checkpoint: see `shapes`. Returns lines for the user.

        `next_sample`: the number of samples before it. What is left out since then may follow. `rows`: those of each batch that this
        rank makes; None: all.

        Raises:
            ValueError: see DocumentSource.resumed, and earlier.py.
            DamagedShardError, OSError: a shard in which a run of an earlier version has stopped cannot be read.
        """
        lanes = np.asarray(tensors["lanes"])
        if lanes.size and not 0 <= lanes.min() <= lanes.max() <= _MAX_PLACE:
            raise ValueError(f"data: the checkpoint has places in the documents from {lanes.min()} to {lanes.max()}")
        lines: list[str] = []
        sources, has_other_keys, is_earlier = [], False, earlier.is_earlier(meta["order"].get(earlier.KEY, 1))
        for index, (source, saved) in enumerate(zip(self._new.sources, meta["sources"], strict=True)):
            packed = np.asarray(tensors[f"shards/{source.name}"]).tobytes()
            its = unpacked(packed, most_bytes=_LEAST_LIST_BYTES + 4 * source.shards.plain_bytes)
            furthest = int(lanes[:, index, CHUNK].max())
            sources.append(
                source.resumed(
                    saved, its.names, its.sizes, furthest, marks=its.marks, listed=its.listed, say=lines.append
                )
            )
            if is_earlier:
                earlier.check_kinds(sources[-1], its.names)
                has_other_keys |= sources[-1].shards.names[: len(its.names)] != its.names
        recipe = replace(self._new, sources=tuple(sources), lanes=int(meta["lanes"]))
        if is_earlier:
            own = range(recipe.batch) if rows is None else rows
            earlier.check_places(recipe, lanes, sorted({row // recipe.per_lane for row in own}))
        self._begin(recipe)
        self._stream.load(next_sample // self.lanes, lanes)
        has_other_keys &= recipe.share != (0.0, 1.0)
        return lines + (earlier.remarks(sources, has_other_keys=has_other_keys) if is_earlier else [])

    def start_over(self) -> None:
        """Go back to the begin of the run. After `go_on`."""
        self._begin(self._new)

    def _numbers(self, step: int) -> list[int]:
        """The numbers of the rows that each lane makes in a step."""
        firsts = np.arange(self._recipe.per_lane) * self.lanes
        numbers: list[int] = (self.samples(step, firsts) // self.lanes).tolist()
        return numbers

    def _settings(self) -> dict[str, Any]:
        """The settings that decide what the places in a state mean."""
        recipe = self._new
        settings = {"data.packing": recipe.packing, "data.heldout": recipe.share[0], "train.seed": recipe.seed}
        return {**settings, "data.tokenizer": recipe.tokenizer.name, "data.separator": recipe.tokenizer.separator}

    def _begin(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._lists: dict[str, np.ndarray] = {}  # of the shards, when they have been asked for
        self._stream = Stream(recipe, self._open_lanes(recipe))


def _is_same(name: str, before: Any, now: Any) -> bool:
    """Whether a setting of a checkpoint is that of this run. A tokenizer's file may have another name: its hash tells."""
    if name == "data.tokenizer":
        return str(before).rpartition(" ")[2] == str(now).rpartition(" ")[2]
    return bool(before == now)


class HeldoutDocuments:
    """Batches for evaluation: the first rows of the documents that are held out. They are read once, and kept.

    Args:
        recipe: of the held-out documents, with a lane for each row; None if `num_batches` is 0.
        num_batches: batches of an evaluation. If the only source has no held-out document, the attribute `num_batches` is 0.
        open_lanes: as for DocumentBatches.
    """

    def __init__(self, recipe: Recipe | None, num_batches: int, open_lanes: Callable[[Recipe], OpenLanes]) -> None:
        self._new, self._most, self._open_lanes = recipe, num_batches, open_lanes
        self._begin(recipe)

    def rename(self, names: Mapping[tuple[str, str], str]) -> None:
        """Take these names of shards, by their sources and paths, for the keys of documents; the names of the list for all others.

        Errors: see Recipe.check.
        """
        if self._new is None or self._begun is None:
            return
        sources = tuple(source.renamed(names) for source in self._new.sources)
        if [its.shards.names for its in sources] != [its.shards.names for its in self._begun.sources]:
            self._begin(replace(self._new, sources=sources))

    def _begin(self, recipe: Recipe | None) -> None:
        self.num_batches, self._begun, self._recipe = self._most, recipe, recipe
        self._rows: dict[int, TokenRows] = {}  # of each batch
        self._stream: Stream | None = None
        self.lacks = ""
        """What too few documents change, as text; else empty."""
        if recipe is None:
            return
        try:
            recipe.check()
        except AllOnOtherSideError as error:
            if len(recipe.sources) > 1:
                raise
            self.num_batches, self._recipe = 0, None
            self.lacks = (
                f"none of {error.num_documents} documents is held out (data.heldout), so there are no evaluations"
            )
        else:
            self.batch = recipe.batch
            self._stream = Stream(recipe, self._open_lanes(recipe))

    def get(self, index: int, rows: Sequence[int]) -> TokenRows:
        """Rows of evaluation batch `index`, 0 to num_batches - 1. A rank asks for the same rows each time."""
        if self._stream is not None and index not in self._rows:
            self._rows[index] = self._stream.get([index], rows)
            if len(self._rows) == self.num_batches:
                self._stream = None  # the shards need not stay open
        return self._rows[index]

    @property
    def sources(self) -> list[str]:
        """The names of the sources."""
        return [] if self._recipe is None else [source.name for source in self._recipe.sources]

    def sources_of(self, index: int, rows: Sequence[int]) -> np.ndarray:
        """The number of the source of each of these rows."""
        assert self._recipe is not None
        return self._recipe.sources_of([index], rows)
