"""The loss by source of data. It follows from the losses of tokens that the model computes anyway, and changes no number."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from mpitrain.models.loss import observed
from mpitrain.train.batches.micro_batch import MicroBatch


class SourceLosses:
    """The mean loss of the targets that count, of the rows of each source in the global batch. With one source it does nothing.

    Args:
        model: of a family of `mpitrain.models`; of a pipeline, this rank's stages.
        names: of the sources.
        figure: the figure of source NAME is called `figure/NAME`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, figure: str = "loss") -> None:
        self._model, self._names, self._figure = model, list(names) if len(names) > 1 else [], figure
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
        """This rank's part of what `figures` needs: of each source the sum of the losses, then of each the number of targets.

        Zeros on a rank that computes no loss, as in most stages of a pipeline. A row belongs to one source. Empty with one source.
        """
        if not self._names:
            return []
        sums, counts = np.zeros(len(self._names)), np.zeros(len(self._names))
        for batch, losses in zip(batches, self._seen, strict=bool(self._seen)):
            assert batch.sources is not None
            of_rows = losses.view(batch.targets.shape).sum(1, dtype=torch.float64).cpu().numpy()
            sums += np.bincount(batch.sources, of_rows, len(sums))
            counts += np.bincount(batch.sources, batch.counted_by_row.numpy(), len(counts))
        self._seen = []
        return [*sums.tolist(), *counts.tolist()]

    def figures(self, totals: Sequence[float]) -> dict[str, float]:
        """The figures, from the totals of `sums` over all ranks. A source without targets in the batch is left out.

        Ranks of tensor parallelism have the same rows, and add both the losses and the numbers.
        """
        half = len(self._names)
        each = zip(self._names, totals[:half], totals[half:], strict=True)
        return {f"{self._figure}/{name}": total / num for name, total, num in each if num}
