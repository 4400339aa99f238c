"""What the ranks of a save or a load have been given: the same, but for a stage of a pipeline that trains nothing."""

from collections.abc import Sequence

import torch

from ckpt.ranks import Ranks
from collectives import Communicator
from collectives.diagnosis.record import shown_ranks
from mpitrain.sharding import EMA


def agreed_optimizer(
    optimizer: torch.optim.Optimizer | None,
    ema: EMA | None,
    only: str | Sequence[str] | None,
    ranks: Ranks,
    stages: Communicator | None,
    doing: str,
) -> torch.optim.Optimizer | None:
    """The optimizer of this rank; None if no rank has one. `stages`: the ranks of the pipeline, or None. Collective over `ranks`.

    torch makes no optimizer without parameters, so a stage that trains nothing has None. It gets an empty one here. ValueError on all
    ranks if `ema` or `only` is None on some of them, or the optimizer on some ranks of a stage.
    """
    stage = 0 if stages is None else stages.rank
    mine = {"optimizer": (stage, optimizer is not None), "ema": (0, ema is not None), "only": (0, only is not None)}
    kind = None if optimizer is None else type(optimizer).__name__
    of_ranks = ranks.all_gather_object((mine, kind))
    for what in mine:
        found = [theirs[what] for theirs, _ in of_ranks]
        if lacking := [rank for rank, (of, is_given) in enumerate(found) if not is_given and (of, True) in found]:
            raise ValueError(
                f"{doing}: {what} is None on {shown_ranks(lacking)} alone; pass it on all ranks, or on none"
            )
    kinds = [its for _, its in of_ranks if its is not None]
    return _empty(kinds[0]) if optimizer is None and kinds else optimizer


def _empty(kind: str) -> torch.optim.Optimizer:
    """An optimizer that trains nothing, and whose class has this name."""
    optimizer: torch.optim.Optimizer = type(kind, (torch.optim.Optimizer,), {})([{"params": []}], {})
    optimizer.param_groups.clear()
    return optimizer
