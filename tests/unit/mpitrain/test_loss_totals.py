"""Sums of losses over slices: the same bits however the slices are dealt to ranks."""

import numpy as np
import torch
from torch import nn

from mpitrain.job.train.batches.losses import SourceLosses
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.models.loss import IGNORED, make_loss
from mpitrain.sharding.slices import Slices

COUNT, ROWS, LENGTH, VOCAB = 8, 2, 5, 7


def test_losses_by_source_do_not_depend_on_the_number_of_ranks() -> None:
    """Of losses of so different sizes that sums in fp64 round."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(COUNT, ROWS, LENGTH, VOCAB, generator=generator)
    logits *= 10 ** (12 * torch.rand(COUNT, ROWS, LENGTH, 1, generator=generator) - 1)
    targets = torch.randint(VOCAB, (COUNT, ROWS, LENGTH), generator=generator)
    model = nn.Module()
    model.loss = make_loss()

    def message(slices: Slices, losses: SourceLosses) -> np.ndarray:
        """The numbers of one rank."""
        its = []
        for number, counts in slices.rounds:
            kept = targets[number] if counts else torch.full_like(targets[number], IGNORED)
            its.append(MicroBatch(kept, kept, sources=np.array([0, number % 2]), slice=number))
        with losses.observing():
            for batch in its:
                assert batch.slice is not None
                model.loss(logits[batch.slice].flatten(0, 1), batch.targets.flatten())
        return np.array(losses.sums(its))

    def figures(num_ranks: int) -> dict[str, float]:
        ranks = [Slices(COUNT, num_ranks, rank) for rank in range(num_ranks)]
        losses = SourceLosses(model, ["a", "b"], ranks[0])
        return losses.figures(sum(message(slices, losses) for slices in ranks).tolist())

    expected = figures(1)
    assert list(expected) == ["loss/a", "loss/b"]
    for num_ranks in (2, 3, 5, 8):
        assert figures(num_ranks) == expected
