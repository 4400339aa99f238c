"""This rank's part of the global batches, as tensors on the host."""

from itertools import pairwise
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
        begin, end = self._rows(self.train.batch)
        cuts = [begin + (end - begin) * n // self._num_micro for n in range(self._num_micro + 1)]
        return [_micro_batch(self.train.get(step, first, last)) for first, last in pairwise(cuts)]

    def of_evaluation(self, index: int) -> MicroBatch:
        """The micro-batch of evaluation batch `index`, 0 to `heldout.num_batches - 1`."""
        return _micro_batch(self.heldout.get(index, *self._rows(self.heldout.batch)))

    def _rows(self, batch: int) -> tuple[int, int]:
        """The rows of a global batch that are this rank's: as many as each other rank's, or one more or less."""
        return batch * self._data.rank // self._data.size, batch * (self._data.rank + 1) // self._data.size


def _micro_batch(rows: np.ndarray) -> MicroBatch:
    tokens = torch.from_numpy(rows)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:])
