"""Training and evaluation batches of documents, with the interface of `order.Batches` and `order.HeldoutBatches`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.data.cache import ShardCache
from mpitrain.data.corpus import share_of
from mpitrain.data.positions import Positions
from mpitrain.data.shards import unpacked
from mpitrain.data.streaming.feed import CHUNK, Tolerance
from mpitrain.data.streaming.mixture import Mixture
from mpitrain.data.streaming.packing import Packing
from mpitrain.data.streaming.sources import Source
from mpitrain.data.streaming.stream import NUM_INTEGERS, Rows, Stream, rows_per_lane
from mpitrain.data.tokenizers import Tokenizer

Points = Sequence[tuple[float, float]]
"""The weight of a source: (step, weight) in order."""


class DocumentBatches(Positions):
    """Training batches of documents, without end.

    Args:
        sources: at the begin of the run.
        weights: of each source.
        lanes: the run's lanes, a divisor of `batch`.
        context: tokens of a row that the model sees.
        batch: rows of a global batch.
        seed: the run's seed.
        packing: how documents fill rows.
        heldout: the share of documents that are held out.
        cache: for shards that are remote or compressed.
        tokenizer: of the documents.
        tolerance: what happens to damaged documents.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Points],
        *,
        lanes: int,
        context: int,
        batch: int,
        seed: int,
        packing: Packing,
        heldout: float,
        cache: ShardCache,
        tokenizer: Tokenizer,
        tolerance: Tolerance,
    ) -> None:
        super().__init__(batch)
        self._new, self._weights, self._heldout, self._tolerance = tuple(sources), weights, heldout, tolerance
        self.lanes, self._context, self._seed, self._packing = lanes, context, seed, packing
        self._cache, self._tokenizer = cache, tokenizer
        self._begin(self._new)

    def get(self, step: int, lo: int, hi: int) -> Rows:
        """Rows lo to hi of the global batch of a step. A rank asks for its rows in order: see Stream."""
        firsts = np.arange(self.batch // self.lanes) * self.lanes
        return self._stream.get((self.samples(step, firsts) // self.lanes).tolist(), lo, hi)

    def state(self, step: int, lo: int, hi: int) -> tuple[dict[str, Any], dict[str, np.ndarray], int]:
        """The state after `step` steps: an entry of the checkpoint's meta, the lists of shards, and this rank's lanes.

        Returns the meta, tensors that are the same on all ranks and `lanes`, and the number of the first lane in `lanes`, which has
        the shape (lanes of this rank, sources, 4). The rows lo to hi are this rank's in each batch.
        """
        first, lanes = self._stream.state(self.next_sample(step) // self.lanes, lo, hi)
        tensors = {f"shards/{source.name}": np.frombuffer(source.shards.packed(), np.uint8) for source in self._sources}
        listed = {name: len(packed) for name, packed in tensors.items()}
        sources = [source.meta() for source in self._sources]
        meta = {"lanes": self.lanes, "order": self._order(), "sources": sources, "list_bytes": listed}
        return meta, {**tensors, "lanes": lanes}, first

    def shapes(self, meta: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
        """The shapes and dtypes of the tensors of `state`, with all lanes.

        ValueError if the state is of other sources, or of settings with which its places would mean others.
        """
        there, here = (
            [(each["name"], each["field"]) for each in its] for its in (meta["sources"], self._meta_of_sources())
        )
        settings = {"data.sources": (there, here)} | {
            name: (meta["order"].get(name), value) for name, value in self._order().items()
        }
        for name, (before, now) in settings.items():
            if before != now:
                raise ValueError(
                    f"{name}: the run was saved with {before}, got {now}: its place in the documents would be another; take the same, "
                    "or start another run with --run"
                )
        rows_per_lane(meta["lanes"], self.batch)
        lists = {name: ((int(num),), np.uint8) for name, num in meta["list_bytes"].items()}
        return {"lanes": ((meta["lanes"], len(here), NUM_INTEGERS), np.int64), **lists}

    def load(self, next_sample: int, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        """Put back a state of `state`, with the lanes of all ranks. ValueError: see Source.resumed.

        `next_sample`: the number of samples before it. What is left out since then may follow.
        """
        lanes = np.asarray(tensors["lanes"])
        self.lanes = int(meta["lanes"])
        sources = []
        for index, (source, saved) in enumerate(zip(self._new, meta["sources"], strict=True)):
            names, sizes = unpacked(np.asarray(tensors[f"shards/{source.name}"]).tobytes())
            sources.append(source.resumed(saved, names, sizes, furthest=int(lanes[:, index, CHUNK].max())))
        self._begin(sources)
        self._stream.load(next_sample // self.lanes, lanes)

    def start_over(self) -> None:
        """Go back to the begin of the run. After `go_on`."""
        self._begin(self._new)

    def num_damaged(self, lo: int, hi: int) -> int:
        """The damaged documents so far in the lanes of which the last row of a batch is one of lo to hi."""
        return self._stream.num_damaged(lo, hi)

    def _order(self) -> dict[str, Any]:
        """The settings that decide what the places in a state mean."""
        settings = {"data.packing": self._packing, "data.heldout": self._heldout, "train.seed": self._seed}
        return {**settings, "data.tokenizer": self._tokenizer.name}

    def _meta_of_sources(self) -> list[dict[str, Any]]:
        return [source.meta() for source in self._new]

    def _begin(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        keeps = (lambda key: share_of(key) >= self._heldout) if self._heldout else None
        feeds = [
            source.feed(self._tokenizer.document, seed=self._seed, keeps=keeps, cache=self._cache) for source in sources
        ]
        per_lane = rows_per_lane(self.lanes, self.batch)
        mixture = Mixture(self._weights, seed=self._seed, lanes=self.lanes, per_lane=per_lane)
        self._stream = Stream(
            feeds, mixture, lanes=self.lanes, batch=self.batch, context=self._context, seed=self._seed,
            packing=self._packing, tolerance=self._tolerance,
        )  # fmt: skip


class HeldoutDocuments:
    """Batches for evaluation: the first rows of the documents that are held out. They are read once, and kept.

    Args:
        sources: of the held-out data, or of the training data, of which `heldout` is the share that is held out.
        weights: of each source.
        num_batches: batches of an evaluation.
        The others: see DocumentBatches.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[Points],
        *,
        num_batches: int,
        context: int,
        batch: int,
        seed: int,
        packing: Packing,
        heldout: float | None,
        cache: ShardCache,
        tokenizer: Tokenizer,
        tolerance: Tolerance,
    ) -> None:
        self.num_batches, self.batch = num_batches, batch
        self._rows: dict[tuple[int, int, int], Rows] = {}
        if not num_batches:
            return
        keeps = None if heldout is None else (lambda key: share_of(key) < heldout)
        feeds = [source.feed(tokenizer.document, seed=seed, keeps=keeps, cache=cache) for source in sources]
        mixture = Mixture(weights, seed=seed, lanes=batch)
        self._stream: Stream | None = Stream(
            feeds, mixture, lanes=batch, batch=batch, context=context, seed=seed, packing=packing, tolerance=tolerance
        )

    def get(self, index: int, lo: int, hi: int) -> Rows:
        """Rows lo to hi of evaluation batch `index`, 0 to num_batches - 1. A rank asks for the same rows each time."""
        if self._stream is not None and (index, lo, hi) not in self._rows:
            self._rows[index, lo, hi] = self._stream.get([index], lo, hi)
            if len(self._rows) == self.num_batches:
                self._stream = None  # the shards need not stay open
        return self._rows[index, lo, hi]
