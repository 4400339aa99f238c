"""Evaluation: the loss on the held-out data."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from mpitrain.job.config import TrainConfig
from mpitrain.job.train.batches.losses import SourceLosses
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.batches.rank_batches import RankBatches
from mpitrain.job.train.batches.totals import LossTotal
from mpitrain.job.train.passes import Passes

BITS_PER_NAT = 1 / math.log(2)


class Evaluation(NamedTuple):
    """The mean loss of the targets that count, in nats, and in bits per byte of their text. NaN if none counts, or it is not known."""

    loss: float
    bits_per_byte: float
    num_batches: int
    knows_text: bool
    by_source: Mapping[str, float]
    """See `SourceLosses.figures`."""

    def __str__(self) -> str:
        in_bits = f", {self.bits_per_byte:.4f} bits per byte" if self.knows_text else " a token"
        return f"held-out {self.loss:.4f} nats{in_bits}, {self.num_batches} batches"

    def metrics(self) -> dict[str, float]:
        """What metrics.jsonl has of it."""
        in_bits = {"heldout_bits_per_byte": self.bits_per_byte} if self.knows_text else {}
        return {"heldout_loss": self.loss, **in_bits, **self.by_source}


class Evaluator:
    """Evaluates the model of a run.

    Args:
        train: the settings that say when.
        batches: of the run.
        passes: of the model.
        by_source: the losses by source of the held-out data.
        loss_total: sums losses over the ranks.
        total: sums numbers over all ranks.
        is_alive: is called before each batch: an evaluation may take longer than a supervisor waits for a sign of life.
        knows_text: whether the text of the tokens is known.
    """

    def __init__(
        self,
        train: TrainConfig,
        batches: RankBatches,
        passes: Passes,
        by_source: SourceLosses,
        *,
        loss_total: LossTotal,
        total: Callable[..., list[float]],
        is_alive: Callable[[], object],
        knows_text: bool,
    ) -> None:
        self._train, self._batches, self._passes, self._total = train, batches, passes, total
        self._by_source, self._loss_total = by_source, loss_total
        self._is_alive, self._knows_text = is_alive, knows_text

    def is_due(self, step: int) -> bool:
        """Whether the run evaluates after this step."""
        every = self._train.eval_every
        at_this_step = step == self._train.steps or (every and step % every == 0)
        return bool(self._batches.heldout.num_batches and at_this_step)

    def evaluate(self) -> Evaluation:
        """The mean loss over the targets of the held-out batches that count. Collective.

        It is the same for any number of ranks: except for rounding, and with slices bit for bit.
        """
        num_batches = self._batches.heldout.num_batches
        read = (batch for index in range(num_batches) for batch in self._batches.of_evaluation(index))
        batches = list(self._alive_at_each(read))
        num_counted = sum(batch.num_counted for batch in batches)
        num_bytes = sum(map(self._batches.num_bytes, batches))
        with self._by_source.observing():
            losses = self._passes.evaluate(self._alive_at_each(batches))
        counted, in_bytes, *sums = self._total(
            num_counted,
            num_bytes,
            *self._loss_total.values(batches, losses),
            *self._by_source.sums(batches),
        )
        of_losses, of_sources = sums[: self._loss_total.num_values], sums[self._loss_total.num_values :]
        loss = self._loss_total.total(of_losses) / counted if counted else math.nan
        knows_bits = self._knows_text and counted and in_bytes
        bits_per_byte = loss * BITS_PER_NAT * (counted / in_bytes) if knows_bits else math.nan
        return Evaluation(loss, bits_per_byte, num_batches, self._knows_text, self._by_source.figures(of_sources))

    def _alive_at_each(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._is_alive()
            yield batch
