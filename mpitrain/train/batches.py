"""This rank's part of the global batches, as tensors on the host."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

import ckpt
from collectives import Communicator
from mpitrain.config import Config
from mpitrain.data import Batches, HeldoutBatches
from mpitrain.data.cache import ShardCache
from mpitrain.data.loading import Corpus, Documents
from mpitrain.data.streaming.batches import DocumentBatches, HeldoutDocuments
from mpitrain.data.streaming.feed import Tolerance
from mpitrain.data.streaming.stream import Rows
from mpitrain.data.tokenizers import BYTES, Bytes, Tokenizer
from mpitrain.data.tokens import TokenFiles
from mpitrain.models.loss import IGNORED, num_counted


class MicroBatch(NamedTuple):
    """Sequences of one forward: (B, L) int64 each. Targets with -100 (`models.loss.IGNORED`) do not count."""

    tokens: torch.Tensor
    targets: torch.Tensor

    @property
    def num_counted(self) -> int:
        """The number of targets that count."""
        return int(num_counted(self.targets))

    def to(self, device: torch.device) -> "MicroBatch":
        """The same sequences on a device."""
        return MicroBatch(*(rows.to(device, non_blocking=True) for rows in self))


class RankBatches:
    """The micro-batches of this rank.

    The rows of all ranks and micro-batches, in order, are the global batch.

    Args:
        config: the settings.
        found: the data.
        data: the ranks that share a global batch.
        tokenizer: of the data; None if it is not known.
        all_ranks: all ranks of the run. Those of tensor parallelism and of a pipeline have the same rows.
        leads: whether this rank is the first one of those that have the same rows.
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
        tokenizer: Tokenizer | None = None,
        all_ranks: Communicator | None = None,
        leads: bool = True,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        train, context = config.train, config.model.resolve().context
        self._data, self._all, self._leads, self._num_micro = data, all_ranks or data, leads, train.accumulate
        self._may_fail = not isinstance(found, Corpus)  # while it reads: then the ranks raise an error together
        self._vocab, self._tokenizer = config.model.resolve().vocab, tokenizer
        self._tolerance = Tolerance(config.data.max_bad_samples, say)
        self.train: Batches | DocumentBatches
        self.heldout: HeldoutBatches | HeldoutDocuments
        if not isinstance(found, Documents):
            self.train = Batches(found.train, context=context, batch=train.batch, seed=train.seed)
            self.heldout = HeldoutBatches(
                found.heldout, context=context, batch=train.batch, num_batches=train.eval_batches
            )
            return
        share = config.data.heldout if found.heldout is None else 0.0
        rows: dict[str, Any] = {
            "context": context, "batch": train.batch, "seed": train.seed, "packing": config.data.packing,
            "cache": ShardCache(config.data.cache, limit_bytes=config.data.cache_bytes), "tolerance": self._tolerance,
            "tokenizer": tokenizer or Bytes(),
        }  # fmt: skip
        weights = [source.points for source in config.data.sources] or [((0, 1.0),)]
        self.train = DocumentBatches(found.train, weights, lanes=found.lanes, heldout=share, **rows)
        self.heldout = HeldoutDocuments(
            found.heldout or found.train,
            [source.points for source in config.data.heldout_sources] or weights,
            num_batches=train.eval_batches if found.heldout or share else 0,
            heldout=None if found.heldout else share,
            **rows,
        )

    def of_step(self, step: int) -> list[MicroBatch]:
        """All micro-batches of a step (0, 1, ...). Collective unless they are of a corpus: an error is raised on all ranks.

        ValueError or OSError if a file cannot be read, or has tokens that the model does not have.
        """
        begin, end = self._rows(self.train.batch)
        cuts = [begin + (end - begin) * n // self._num_micro for n in range(self._num_micro + 1)]
        with self._all.together() if self._may_fail else nullcontext():
            return [self._micro_batch(self.train.get(step, first, last)) for first, last in pairwise(cuts)]

    def of_evaluation(self, index: int) -> MicroBatch:
        """The micro-batch of evaluation batch `index`, 0 to `heldout.num_batches - 1`. Collective as `of_step`."""
        with self._all.together() if self._may_fail else nullcontext():
            return self._micro_batch(self.heldout.get(index, *self._rows(self.heldout.batch)))

    def num_bytes(self, batch: MicroBatch) -> int:
        """The bytes of text that the targets are which count."""
        if self._tokenizer is None or self._tokenizer.name == BYTES:
            return batch.num_counted
        return sum(len(self._tokenizer.decode(row[row != IGNORED].numpy())) for row in batch.targets)

    def num_damaged(self) -> int:
        """The damaged documents that this rank has passed over so far; 0 unless it `leads`."""
        if not (self._leads and isinstance(self.train, DocumentBatches)):
            return 0
        return self.train.num_damaged(*self._rows(self.train.batch))

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
            meta, tensors, first = self.train.state(step, *self._rows(self.train.batch))
        lanes = tensors.pop("lanes")
        kept: dict[str, Any] = {f"data/{name}": array for name, array in tensors.items()}
        shape = (self.train.lanes, *lanes.shape[1:])
        kept["data/lanes"] = ckpt.Shard(lanes, shape, (first, 0, 0)) if self._leads and len(lanes) else []
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
        return {f"data/{name}": np.empty(shape, kind) for name, (shape, kind) in self.train.shapes(meta).items()}

    def load(self, step: int, next_sample: int, meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        """Go on after `step` steps, with the tensors of a checkpoint. ValueError if shards of that time are missing or changed.

        Documents without a state begin anew.
        """
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
        self.train.go_on(0, 0)
        if isinstance(self.train, DocumentBatches):
            self.train.start_over()

    def _rows(self, batch: int) -> tuple[int, int]:
        """The rows of a global batch that are this rank's: as many as each other rank's, or one more or less."""
        return batch * self._data.rank // self._data.size, batch * (self._data.rank + 1) // self._data.size

    def _micro_batch(self, rows: "np.ndarray | Rows") -> MicroBatch:
        array = rows if isinstance(rows, np.ndarray) else rows.tokens.astype(np.int64)
        if self._may_fail and array.size and not 0 <= array.min() <= array.max() < self._vocab:
            raise ValueError(
                f"model.vocab: the data have the tokens {array.min()} to {array.max()}, and the model has 0 to {self._vocab - 1}; "
                "take the vocabulary of the tokens' tokenizer"
            )
        tokens = torch.from_numpy(array)
        targets = tokens[:, 1:]
        if not isinstance(rows, np.ndarray) and rows.is_whole:
            # Whole documents do not go on in the next one, and padding is none.
            segments = torch.from_numpy(rows.segments)
            targets = targets.where((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0), IGNORED)
        return MicroBatch(tokens[:, :-1], targets)
