"""This rank's part of the global batches, as tensors on the host."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import ckpt
from collectives import Communicator
from mpitrain.config import Config
from mpitrain.data import Batches, HeldoutBatches
from mpitrain.data.loading import Corpus, Documents, shard_cache
from mpitrain.data.streaming.batches import DocumentBatches, HeldoutDocuments
from mpitrain.data.streaming.feed import Tolerance
from mpitrain.data.streaming.lanes import Recipe, open_lanes
from mpitrain.data.streaming.processes import Processes
from mpitrain.data.streaming.stream import LaneStates, Rows
from mpitrain.data.tokenizers import BYTES, Bytes, Tokenizer
from mpitrain.data.tokens import TokenFiles
from mpitrain.models.loss import IGNORED
from mpitrain.models.segments import Segments
from mpitrain.sharding.slices import Slices
from mpitrain.train.batches.micro_batch import Copies, MicroBatch
from mpitrain.train.batches.parts import Part, parts_of, rows_of

CPU = torch.device("cpu")


class _Ahead(NamedTuple):
    """A step that was read before it is asked for. `sample`: its first one. `states`: of the rank's lanes before it, of documents."""

    step: int = -1
    sample: int = -1
    batches: Sequence[MicroBatch] = ()
    states: LaneStates | None = None
    error: Exception | None = None


class RankBatches:
    """The micro-batches of this rank.

    The rows of all ranks and micro-batches, in order, are the global batch. With slices the ranks take turns: see sharding/slices. In a
    round without a slice the micro-batch is an earlier one without targets that count.

    Args:
        config: the settings.
        found: the data.
        data: the ranks that share a global batch.
        device: on which the ranks compute. A GPU gets the micro-batches of a step during the step before.
        tokenizer: of the data; None if it is not known.
        all_ranks: all ranks of the run. Those of tensor parallelism and of a pipeline have the same rows.
        same: the ranks with the same rows, those of tensor parallelism and of a pipeline. The first one reads documents for all.
        say: gets a line about each damaged document.

    Raises:
        ValueError: the data are too few for a batch, or the settings do not fit them.
    """

    def __init__(
        self,
        config: Config,
        found: Corpus | Documents | TokenFiles,
        data: Communicator,
        *,
        device: torch.device = CPU,
        tokenizer: Tokenizer | None = None,
        all_ranks: Communicator | None = None,
        same: Communicator | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        train, context = config.train, config.model.resolve().context
        self._data, self._all, self._num_micro = data, all_ranks or data, train.accumulate
        self._seed = train.seed
        self._slices = Slices(train.slices, data.size, data.rank) if train.slices else None
        self._same = same if same is not None and same.size > 1 and isinstance(found, Documents) else None
        self._leads = same is None or same.rank == 0
        self._length = context + 1  # of a row
        self._may_fail = not isinstance(found, Corpus)  # while it reads: then the ranks raise an error together
        self._vocab, self._tokenizer = config.model.resolve().vocab, tokenizer
        self._mask_documents = config.data.mask_documents
        self.is_padded = isinstance(found, Documents) and config.data.packing == "whole"
        """Whether padding may fill rows up."""
        self._tolerance = Tolerance(config.data.max_bad_samples)
        self._processes: Processes | None = None
        self._ahead = _Ahead()
        self._copies = Copies(device) if device.type == "cuda" else None
        self.train: Batches | DocumentBatches
        self.heldout: HeldoutBatches | HeldoutDocuments
        if not isinstance(found, Documents):
            self.train = Batches(found.train, context=context, batch=train.batch, seed=train.seed)
            self.heldout = HeldoutBatches(
                found.heldout, context=context, batch=train.batch, num_batches=train.eval_batches
            )
            return
        self._check_lanes(found.lanes)
        share = config.data.heldout if found.heldout is None else 0.0
        weights = tuple(source.points for source in config.data.sources) or (((0, 1.0),),)
        recipe = Recipe(
            found.train, weights, found.lanes, train.batch, context, train.seed, config.data.packing,
            shard_cache(config.data, found.shards), tokenizer or Bytes(),
            share=(share, 1.0), max_damaged=config.data.max_bad_samples,
        )  # fmt: skip
        here = partial(open_lanes, say=say)
        self._processes = Processes(config.data.processes, say) if config.data.processes and self._leads else None
        self.train = DocumentBatches(recipe, here if self._processes is None else self._processes.open_lanes)
        of_heldout = replace(recipe, lanes=train.batch, share=(0.0, share))
        if found.heldout is not None:
            weights = tuple(source.points for source in config.data.heldout_sources)
            of_heldout = replace(of_heldout, sources=found.heldout, weights=weights, share=(0.0, 1.0))
        num_batches = train.eval_batches if found.heldout is not None or share else 0
        self.heldout = HeldoutDocuments(
            of_heldout if num_batches else None, num_batches, partial(here, fetches_ahead=False)
        )

    def close(self) -> None:
        """End the tokenizing processes."""
        if self._processes is not None:
            self._processes.close()

    def of_step(self, step: int) -> Sequence[MicroBatch]:
        """All micro-batches of a step (0, 1, ...). Collective unless they are of a corpus: an error is raised on all ranks.

        ValueError or OSError if a file cannot be read, or has tokens that the model does not have.
        """
        if (self._ahead.step, self._ahead.sample) != (step, self.train.next_sample(step)):
            self.prepare(step)
        with self._all.together() if self._may_fail else nullcontext():
            if self._ahead.error is not None:
                raise self._ahead.error
        return self._ahead.batches

    def prepare(self, step: int) -> None:
        """Read the micro-batches of a step before `of_step` asks for them, which also raises the error, if there is one. Collective."""
        its = self._parts(self.train, self._num_micro)
        states: LaneStates | None = None

        def read() -> "np.ndarray | Rows":
            nonlocal states
            if isinstance(self.train, DocumentBatches):
                states = self.train.states(step, rows_of(its))
            return self.train.get(step, rows_of(its))

        def parts(rows: "np.ndarray | Rows") -> list[MicroBatch]:
            batches = self._micro_batches(rows, its, self.train, step)
            return batches if self._copies is None else [self._copies.begun(batch) for batch in batches]

        batches, error = self._read(read, parts, len(rows_of(its)))
        self._ahead = _Ahead(step, self.train.next_sample(step), batches, states, error)

    def of_evaluation(self, index: int) -> Sequence[MicroBatch]:
        """The micro-batches of evaluation batch `index`, 0 to `heldout.num_batches - 1`: one, or one for each round of slices.

        Collective as `of_step`.
        """
        its = self._parts(self.heldout, 1)
        wanted = rows_of(its)
        batches, error = self._read(
            lambda: self.heldout.get(index, wanted),
            lambda rows: self._micro_batches(rows, its, self.heldout, index),
            len(wanted),
        )
        with self._all.together() if self._may_fail else nullcontext():
            if error is not None:
                raise error
        return batches

    @property
    def sources(self) -> list[str]:
        """The names of the sources of the training data: the numbers in `MicroBatch.sources` are their indices."""
        return _names_of(self.train)

    @property
    def heldout_sources(self) -> list[str]:
        """The names of the sources of the held-out data."""
        return _names_of(self.heldout)

    def read_heldout(self) -> None:
        """Read the documents for evaluations now, so that an error of them costs no steps. Collective as `of_step`."""
        if isinstance(self.heldout, HeldoutDocuments):
            for index in range(self.heldout.num_batches):
                self.of_evaluation(index)

    def num_bytes(self, batch: MicroBatch) -> int:
        """The bytes of text that the targets are which count."""
        if self._tokenizer is None or self._tokenizer.name == BYTES:
            return batch.num_counted
        return sum(self._tokenizer.num_bytes(row[row != IGNORED].numpy()) for row in batch.targets)

    def num_damaged(self) -> int:
        """The damaged documents before the step that was read last, in the lanes of this rank."""
        states = self._ahead.states
        return 0 if states is None else states.num_damaged

    def check_damaged(self, num: int) -> None:
        """ValueError on all ranks if so many damaged documents, of all ranks, are too many. Collective then."""
        if num > self._tolerance.most:
            with self._all.together():
                self._tolerance.check(num)

    def state(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint after `step` steps keeps of the data besides the position: a part of its meta, and tensors. Collective."""
        if not isinstance(self.train, DocumentBatches):
            return {}, {}
        with self._all.together():
            is_ahead = (self._ahead.step, self._ahead.sample) == (step, self.train.next_sample(step))
            before = self._ahead.states if is_ahead else None
            meta, tensors = self.train.described()
            kept: dict[str, Any] = {f"data/{name}": array for name, array in tensors.items()} | {"data/lanes": []}
            if self._leads:
                own = before or self.train.states(step, rows_of(self._parts(self.train, self._num_micro)))
                shape = (self.train.lanes, *own.states.shape[1:])
                kept["data/lanes"] = [ckpt.Shard(states, shape, (first, 0, 0)) for first, states in own.pieces()]
        return meta, kept

    def room(self, meta: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Memory for the tensors of `state`. `meta`: of the checkpoint. ValueError if it is of other data."""
        if bool(meta) != isinstance(self.train, DocumentBatches):
            raise ValueError(
                f"data.path: the run was saved with {'documents' if meta else 'text or tokens'}, and its place in these data is not "
                "known; take the same, or start another run with --run"
            )
        if not isinstance(self.train, DocumentBatches):
            return {}
        self._check_lanes(meta["lanes"])
        return {f"data/{name}": np.empty(shape, kind) for name, (shape, kind) in self.train.shapes(meta).items()}

    def load(self, step: int, next_sample: int, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        """Go on after `step` steps, with the tensors of a checkpoint. ValueError if shards of that time are missing or changed.

        Documents without a state begin anew.
        """
        self._ahead = _Ahead()
        if not isinstance(self.train, DocumentBatches):
            self.train.go_on(step, next_sample)
        elif meta:
            self.train.go_on(step, next_sample)
            self.train.load(next_sample, meta, {name.removeprefix("data/"): array for name, array in tensors.items()})
        else:
            self.train.go_on(step, 0)
            self.train.start_over()

    def start_over(self) -> None:
        """Go back to the begin of the run."""
        self._ahead = _Ahead()
        self.train.go_on(0, 0)
        if isinstance(self.train, DocumentBatches):
            self.train.start_over()

    def _read(
        self,
        read: Callable[[], "np.ndarray | Rows"],
        parts: Callable[["np.ndarray | Rows"], list[MicroBatch]],
        num_rows: int,
    ) -> tuple[list[MicroBatch], Exception | None]:
        """What `parts` makes of the rows that `read` reads, on the first one of the ranks that have the same rows; and an error.

        Collective over these ranks. After an error of the first one the others have none, and no micro-batches.
        """
        rows, error = None, None
        try:
            rows = read() if self._leads or self._same is None else None
        except Exception as failed:
            error = failed
        if self._same is not None:
            rows = self._from_first(rows, num_rows)
        try:
            return ([], error) if rows is None else (parts(rows), None)
        except Exception as failed:
            return [], failed

    def _from_first(self, rows: "np.ndarray | Rows | None", num_rows: int) -> Rows | None:
        """The rows of the first one of the ranks that have the same rows; None if it has none."""
        assert self._same is not None
        there = np.zeros((2, num_rows, self._length), np.int32)
        num_read = np.array([0 if rows is None else 1], np.int64)
        self._same.broadcast(num_read)
        if not num_read[0]:
            return None
        if isinstance(rows, Rows):
            there[0], there[1] = rows.tokens, rows.segments
        self._same.broadcast(there)
        return Rows(there[0], there[1], self.is_padded)

    def _check_lanes(self, num_lanes: int) -> None:
        """ValueError if a lane has rows of several slices: each rank of them would read its documents."""
        if self._slices is not None and num_lanes % self._slices.count:
            raise ValueError(
                f"train.slices: expected a divisor of the run's {num_lanes} lanes (data.lanes), so that each slice has lanes of "
                f"its own, got {self._slices.count}; take {num_lanes & -num_lanes} at most, or start another run with --run"
            )

    def _parts(self, of: Batches | DocumentBatches | HeldoutBatches | HeldoutDocuments, num_micro: int) -> list[Part]:
        return parts_of(of.batch, self._data, self._slices, num_micro=num_micro)

    def _micro_batches(
        self, rows: "np.ndarray | Rows", its: Sequence[Part], source: object, index: int
    ) -> list[MicroBatch]:
        """`rows`: `rows_of` the parts, of batch `index` of `source`."""
        sources = _sources_of(source, index, rows_of(its))
        made: list[MicroBatch] = []
        first = 0
        for part in its:
            if not part.counts:
                again = next(batch for batch in made if batch.slice == part.slice)
                made.append(again._replace(targets=torch.full_like(again.targets, IGNORED), num_padding=0))
                continue
            last = first + part.end - part.begin
            seed = None if part.slice is None else (self._seed, index, part.slice)
            batch = self._micro_batch(rows[first:last], sources[first:last])
            made.append(batch._replace(slice=part.slice, seed=seed))
            first = last
        return made

    def _micro_batch(self, rows: "np.ndarray | Rows", sources: np.ndarray) -> MicroBatch:
        array = rows if isinstance(rows, np.ndarray) else rows.tokens.astype(np.int64)
        if self._may_fail and array.size and not 0 <= array.min() <= array.max() < self._vocab:
            raise ValueError(
                f"model.vocab: the data have the tokens {array.min()} to {array.max()}, and the model has 0 to {self._vocab - 1}; "
                "take the vocabulary of the tokens' tokenizer"
            )
        tokens = torch.from_numpy(array)
        targets = tokens[:, 1:]
        if isinstance(rows, np.ndarray):
            return MicroBatch(tokens[:, :-1], targets, sources=sources)
        seen, after = rows.segments[:, :-1], rows.segments[:, 1:]
        if rows.is_whole:
            # Whole documents do not go on in the next one, and padding is none.
            targets = targets.where(torch.from_numpy((seen == after) & (after >= 0)), IGNORED)
        segments = Segments.of(seen) if self._mask_documents else None
        return MicroBatch(tokens[:, :-1], targets, segments, num_padding=int((seen < 0).sum()), sources=sources)


def _names_of(batches: object) -> list[str]:
    return batches.sources if isinstance(batches, DocumentBatches | HeldoutDocuments) else ["data"]


def _sources_of(batches: object, index: int, rows: Sequence[int]) -> np.ndarray:
    """The numbers of the sources of these rows of a batch."""
    if isinstance(batches, DocumentBatches | HeldoutDocuments) and len(batches.sources) > 1:
        return batches.sources_of(index, rows)
    return np.zeros(len(rows), np.int64)
