"""The loss by source of data. It follows from the losses of tokens that the model computes anyway, and changes no number."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.batches.totals import LossTotal
from mpitrain.models.loss import observed
from mpitrain.sharding.slices import Slices


class SourceLosses:
    """The mean loss of the targets that count, of the rows of each source in the global batch. With one source it does nothing.

    Args:
        model: of a family of `mpitrain.models`; of a pipeline, this rank's stages.
        names: of the sources.
        slices: of the model, see `LossTotal`.
        figure: the figure of source NAME is called `figure/NAME`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], slices: Slices | None, *, figure: str = "loss") -> None:
        self._model, self._names, self._figure = model, list(names) if len(names) > 1 else [], figure
        self._total = LossTotal(slices, num_same=1)
        self._seen: list[torch.Tensor] = []  # the losses of the tokens of each micro-batch

    @contextmanager
    def observing(self) -> Iterator[None]:
        """In the block, the losses of all forwards are kept, one forward for each micro-batch, in their order."""
        self._seen = []
        if not self._names:
            yield
            return
        with observed(self._model, lambda logits, targets, losses: self._seen.append(losses)):
            yield

    def sums(self, batches: Sequence[MicroBatch]) -> list[float]:
        """This rank's part of what `figures` needs: of each source the numbers of `LossTotal`, then of each the number of targets.

        Zeros on a rank that computes no loss, as in most stages of a pipeline. A row belongs to one source. Empty with one source.
        """
        if not self._names:
            return []
        num = len(self._names)
        if not self._seen:
            return [0.0] * (num * self._total.num_values + num)
        sums, counts = [], np.zeros(num)
        for batch, losses in zip(batches, self._seen, strict=True):
            assert batch.sources is not None
            of_rows = losses.view(batch.targets.shape).sum(1, dtype=torch.float64).cpu().numpy()
            sums.append(np.bincount(batch.sources, of_rows, num))
            counts += np.bincount(batch.sources, batch.counted_by_row.numpy(), num)
        self._seen = []
        of_sources = [value for its in zip(*sums, strict=True) for value in self._total.values(batches, its)]
        return [*of_sources, *counts.tolist()]

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """The figures, from the totals of `sums` over all ranks. A source without targets in the batch is left out.

        Ranks of tensor parallelism have the same rows, and add both the losses and the numbers.
        """
        num, width = len(self._names), self._total.num_values
        sums = [self._total.total(totals[index * width : (index + 1) * width]) for index in range(num)]
        each = zip(self._names, sums, totals[num * width :], strict=True)
        return {f"{self._figure}/{name}": total / count for name, total, count in each if count}
