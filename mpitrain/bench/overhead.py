"""What hooks and bookkeeping cost: a model of many small units, each sharded over one rank, beside the same model plain.

One rank has nobody to talk to, so nothing but our layer is left of the difference. All ranks do it at once, each alone, as in training.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from collectives.bench.timing import turns
from mpitrain.bench.contestant import LEARNING_RATE, Place
from mpitrain.bench.results import Overhead
from mpitrain.bench.timing import WARM_UP, Clock
from mpitrain.sharding import fully_shard

UNITS, WIDTH, BATCH = 200, 256, 32


class _Trained(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, x: torch.Tensor, place: Place) -> tuple[float, float]:
        """Seconds of forward and backward, and of the whole step."""
        place.comm.barrier()
        clock = Clock(place.device)
        self.model(x).square().mean().backward()
        clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        first, whole = clock.seconds()
        return first, whole


def overhead(place: Place, *, steps: int, units: int = UNITS) -> Overhead:
    """Time `steps` steps of each, in turn. Collective."""
    alone = place.comm.split(place.comm.rank)
    plain, sharded = _model(units, place.device), _model(units, place.device)
    for module in (*sharded, sharded):
        fully_shard(module, alone, units="one")
    both = [_Trained(m, torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, fused=True)) for m in (sharded, plain)]
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0)).to(place.device)
    seconds = np.empty((WARM_UP + steps, 2, 2))
    for round_ in range(WARM_UP + steps):
        for i in turns(round_, 2):
            seconds[round_, i] = both[i].step(x, place)
    medians = np.median(seconds[WARM_UP:], axis=0)
    place.comm.all_reduce(medians, "max")
    (sharded_s, sharded_step_s), (plain_s, plain_step_s) = medians.tolist()
    return Overhead(units, sharded_s, plain_s, sharded_step_s, plain_step_s)


def _model(units: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(units))).to(device)
