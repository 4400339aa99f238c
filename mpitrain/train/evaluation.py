"""Evaluation: the loss on the held-out data."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from mpitrain.config import TrainConfig
from mpitrain.train.batches.losses import SourceLosses
from mpitrain.train.batches.micro_batch import MicroBatch
from mpitrain.train.batches.rank_batches import RankBatches
from mpitrain.train.passes import Passes

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
        total: Callable[..., list[float]],
        is_alive: Callable[[], object],
        knows_text: bool,
    ) -> None:
        self._train, self._batches, self._passes, self._total = train, batches, passes, total
        self._by_source = by_source
        self._is_alive, self._knows_text = is_alive, knows_text

    def is_due(self, step: int) -> bool:
        """Whether the run evaluates after this step."""
        every = self._train.eval_every
        at_this_step = step == self._train.steps or (every and step % every == 0)
        return bool(self._batches.heldout.num_batches and at_this_step)

    def evaluate(self) -> Evaluation:
        """The mean loss over the targets of the held-out batches that count. For any number of ranks the same, except for rounding.

        Collective.
        """
        num_batches = self._batches.heldout.num_batches
        batches = list(self._alive_at_each(map(self._batches.of_evaluation, range(num_batches))))
        num_counted = sum(batch.num_counted for batch in batches)
        num_bytes = sum(map(self._batches.num_bytes, batches))
        with self._by_source.observing():
            own_loss = self._passes.evaluate(self._alive_at_each(batches))
        total_loss, counted, in_bytes, *of_sources = self._total(
            own_loss, num_counted, num_bytes, *self._by_source.sums(batches)
        )
        loss = total_loss / counted if counted else math.nan
        knows_bits = self._knows_text and counted and in_bytes
        bits_per_byte = loss * BITS_PER_NAT * (counted / in_bytes) if knows_bits else math.nan
        return Evaluation(loss, bits_per_byte, num_batches, self._knows_text, self._by_source.figures(of_sources))

    def _alive_at_each(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self._is_alive()
            yield batch
