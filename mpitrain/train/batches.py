"""This rank's part of the global batches, as tensors on the host."""

from typing import NamedTuple

import numpy as np
import torch

from collectives import Communicator
from mpitrain.config import Config
from mpitrain.data import Batches, HeldoutBatches
from mpitrain.data.loading import Corpus
from mpitrain.models.loss import num_counted


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
    """The micro-batches of this rank. `data`: the ranks that share a global batch.

    The rows of all ranks and micro-batches, in order, are the global batch. ValueError if the corpus is too short for one.
    """

    def __init__(self, config: Config, corpus: Corpus, data: Communicator) -> None:
        train, context = config.train, config.model.resolve().context
        self.train = Batches(corpus.train, context=context, batch=train.batch, seed=train.seed)
        self.heldout = HeldoutBatches(
            corpus.heldout, context=context, batch=train.batch, num_batches=train.eval_batches
        )
        self._data, self._num_micro = data, train.accumulate

    def of_step(self, step: int) -> list[MicroBatch]:
        """All micro-batches of a step (0, 1, ...)."""
        count = self.train.batch // (self._data.size * self._num_micro)
        first = self._data.rank * self._num_micro * count
        return [
            _micro_batch(self.train.get(step, first + n * count, first + (n + 1) * count))
            for n in range(self._num_micro)
        ]

    def of_evaluation(self, index: int) -> MicroBatch:
        """The micro-batch of evaluation batch `index`, 0 to `heldout.num_batches - 1`."""
        count = self.heldout.batch // self._data.size
        return _micro_batch(self.heldout.get(index, self._data.rank * count, (self._data.rank + 1) * count))


def _micro_batch(rows: np.ndarray) -> MicroBatch:
    tokens = torch.from_numpy(rows)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:])
