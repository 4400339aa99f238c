"""This rank's part of the global batches, as tensors on the host."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

import ckpt
from collectives import Communicator
from mpitrain.job.config import Config, ConfigError
from mpitrain.job.data import Batches, HeldoutBatches
from mpitrain.job.data.left_out import Interval, merged
from mpitrain.job.data.loading import Corpus, DocumentSources
from mpitrain.job.data.streaming.batches import DocumentBatches, HeldoutDocuments
from mpitrain.job.data.streaming.feed import Tolerance
from mpitrain.job.data.streaming.stream import LaneStates, TokenRows
from mpitrain.job.data.tokenizers import BYTES, Tokenizer
from mpitrain.job.data.tokens import TokenFiles
from mpitrain.job.train.batches.making import MicroBatchMaker, source_names
from mpitrain.job.train.batches.micro_batch import GpuCopies, MicroBatch
from mpitrain.job.train.batches.opening import open_batches
from mpitrain.job.train.batches.parts import BatchPart, parts_of, rows_of
from mpitrain.job.train.batches.shared_reading import SharedReading
from mpitrain.models.loss import IGNORED
from mpitrain.sharding.slices import Slices

CPU = torch.device("cpu")
_MOST_STEPS, _MOST_SAMPLES = 1000, 1 << 20  # that a checkpoint may leave out of documents, whatever the settings are


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
        found: Corpus | DocumentSources | TokenFiles,
        data: Communicator,
        *,
        device: torch.device = CPU,
        tokenizer: Tokenizer | None = None,
        all_ranks: Communicator | None = None,
        same: Communicator | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        train, has_documents = config.train, isinstance(found, DocumentSources)
        self._data, self._all, self._num_micro = data, all_ranks or data, train.accumulate
        self._slices = Slices(train.slices, data.size, data.rank) if train.slices else None
        self._may_fail = not isinstance(found, Corpus)  # while it reads: then the ranks raise an error together
        self._tokenizer = tokenizer
        self.is_padded = has_documents and config.data.packing == "whole"
        """Whether padding may fill rows up."""
        self._reading = SharedReading(
            same if same is not None and same.size > 1 and has_documents else None,
            length=config.model.resolve().context + 1, is_whole=self.is_padded,
        )  # fmt: skip
        self._maker = MicroBatchMaker(config, checks_tokens=self._may_fail)
        self._tolerance = Tolerance(config.data.max_bad_samples)
        # A rewind leaves out a step, and those before it that were skipped.
        most_steps = _MOST_STEPS + (train.max_rewinds + 1) * (train.max_skipped_steps + 1)
        self._most_left_out = max(_MOST_SAMPLES, most_steps * train.batch)
        self._ahead = _Ahead()
        self._copies = GpuCopies(device) if device.type == "cuda" else None
        if isinstance(found, DocumentSources):
            self._check_lanes(found.lanes)
        self.train, self.heldout, self._processes = open_batches(
            config, found, tokenizer, reads=self._reading.leads, say=say
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

        def read() -> "np.ndarray | TokenRows":
            nonlocal states
            if isinstance(self.train, DocumentBatches):
                states = self.train.states(step, rows_of(its))
            return self.train.get(step, rows_of(its))

        def parts(rows: "np.ndarray | TokenRows") -> list[MicroBatch]:
            batches = self._maker.make(rows, its, self.train, step)
            return batches if self._copies is None else [self._copies.begun(batch) for batch in batches]

        batches, error = self._reading.read(read, parts, len(rows_of(its)))
        self._ahead = _Ahead(step, self.train.next_sample(step), batches, states, error)

    def of_evaluation(self, index: int) -> Sequence[MicroBatch]:
        """The micro-batches of evaluation batch `index`, 0 to `heldout.num_batches - 1`: one, or one for each round of slices.

        Collective as `of_step`.
        """
        its = self._parts(self.heldout, 1)
        wanted = rows_of(its)
        batches, error = self._reading.read(
            lambda: self.heldout.get(index, wanted),
            lambda rows: self._maker.make(rows, its, self.heldout, index),
            len(wanted),
        )
        with self._all.together() if self._may_fail else nullcontext():
            if error is not None:
                raise error
        return batches

    @property
    def lacks(self) -> list[str]:
        """At most one line: what too few data change."""
        lacks = [each.lacks for each in (self.train, self.heldout) if each.lacks]
        return [f"few data: {'; '.join(lacks)}"] if lacks else []

    @property
    def sources(self) -> list[str]:
        """The names of the sources of the training data: see `source_names`."""
        return source_names(self.train)

    @property
    def heldout_sources(self) -> list[str]:
        """The names of the sources of the held-out data."""
        return source_names(self.heldout)

    def read_heldout(self) -> None:
        """Read the documents for evaluations now, so that an error of them costs no steps. Collective as `of_step`."""
        if isinstance(self.heldout, HeldoutDocuments):
            for index in range(self.heldout.num_batches):
                self.of_evaluation(index)

    def check_evaluation(self) -> None:
        """ConfigError on all ranks if no batch is held out. After `load`, which decides the names of documents. Collective."""
        with self._all.together():
            if not self.heldout.num_batches:
                raise ConfigError(
                    "train.eval_only: too few data are held out; expected a larger data.heldout, or data.heldout_sources"
                )

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
            if self._reading.leads:
                own = before or self.train.states(step, rows_of(self._parts(self.train, self._num_micro)))
                shape = (self.train.lanes, *own.states.shape[1:])
                kept["data/lanes"] = [ckpt.Shard(states, shape, (first, 0, 0)) for first, states in own.pieces()]
        return meta, kept

    def room(
        self, meta: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, np.ndarray]:
        """Memory for the tensors of `state`. `meta`: of the checkpoint. `stored`: the shapes of its tensors; None: they fit its meta.

        ValueError if it is of other data, or if its meta tells of other tensors than it has.
        """
        if bool(meta) != isinstance(self.train, DocumentBatches):
            its = "documents" if meta else "text or tokens (as which earlier versions took .json)"
            raise ValueError(
                f"data.path: the run was saved with {its}, and its place in these data is not known; take the same, or start "
                "another run with --run"
            )
        if not isinstance(self.train, DocumentBatches):
            return {}
        wanted = {f"data/{name}": of_tensor for name, of_tensor in self.train.shapes(meta).items()}
        self._check_lanes(meta["lanes"])
        for name, (shape, _) in wanted.items():
            if stored is not None and (found := stored.get(name)) != shape:
                its = "no such tensor" if found is None else f"one of shape {found}"
                raise ValueError(
                    f"data: the checkpoint's meta tells of {name!r:.200}, of shape {shape}, and it has {its}"
                )
        return {name: np.empty(shape, kind) for name, (shape, kind) in wanted.items()}

    def load(
        self, step: int, next_sample: int, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
    ) -> list[str]:
        """Go on after `step` steps, with the tensors of a checkpoint. Returns lines for the user.

        ValueError if shards of that time are missing or changed, or are read otherwise now. Documents without a state begin anew.
        """
        self._ahead = _Ahead()
        if not isinstance(self.train, DocumentBatches):
            self.train.go_on(step, next_sample)
        elif meta:
            self.train.go_on(step, next_sample)
            its = {name.removeprefix("data/"): array for name, array in tensors.items()}
            rows = rows_of(self._parts(self.train, self._num_micro)) if self._reading.leads else ()
            before, lines = self.lacks, self.train.load(next_sample, meta, its, rows)
            self._name_heldout()
            return lines + [line for line in self.lacks if line not in before]
        else:
            self.train.go_on(step, 0)
            self.train.start_over()
            self._name_heldout()
        return []

    def check_left_out(self, next_sample: int, intervals: Sequence[Interval]) -> None:
        """ValueError if a checkpoint leaves out more documents after `next_sample` than a run does: lanes read what is left out.

        `intervals`: see Positions.leave_out.
        """
        ahead = sum(max(end - max(begin, next_sample), 0) for begin, end in merged(intervals))
        if isinstance(self.train, DocumentBatches) and ahead > self._most_left_out:
            raise ValueError(
                f"data: the checkpoint leaves out {ahead} rows of documents that follow; expected {self._most_left_out} at most, by "
                "train.max_rewinds and train.max_skipped_steps; take those of the run that saved it, or start another run with --run"
            )

    def start_over(self) -> None:
        """Go back to the begin of the run."""
        self._ahead = _Ahead()
        self.train.go_on(0, 0)
        if isinstance(self.train, DocumentBatches):
            self.train.start_over()
            self._name_heldout()

    def _name_heldout(self) -> None:
        """Split the documents by the keys that the training has: a checkpoint's names of shards need not be those of the list."""
        if isinstance(self.train, DocumentBatches) and isinstance(self.heldout, HeldoutDocuments):
            self.heldout.rename(self.train.changed_names())

    def _check_lanes(self, num_lanes: int) -> None:
        """ValueError if a lane has rows of several slices: each rank of them would read its documents."""
        if self._slices is not None and num_lanes % self._slices.count:
            raise ValueError(
                f"train.slices: expected a divisor of the run's {num_lanes} lanes (data.lanes), so that each slice has lanes of "
                f"its own, got {self._slices.count}; take {num_lanes & -num_lanes} at most, or start another run with --run"
            )

    def _parts(
        self, of: Batches | DocumentBatches | HeldoutBatches | HeldoutDocuments, num_micro: int
    ) -> list[BatchPart]:
        return parts_of(of.batch, self._data, self._slices, num_micro=num_micro)
