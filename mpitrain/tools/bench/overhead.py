"""The time of hooks and bookkeeping: a model of many small units, sharded over one rank, in comparison with the plain model.

With one rank there is no communication, so the difference is the time of our code. All ranks measure at once, each on its own.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from collectives.bench.kit.turns import Seconds, slowest, spread, take_turns
from mpitrain.sharding import fully_shard
from mpitrain.tools.bench.model import LEARNING_RATE, TrainingSetup
from mpitrain.tools.bench.results import HookOverhead
from mpitrain.tools.bench.timing import WARM_UP, DeviceStepClock

UNITS, WIDTH, BATCH = 200, 256, 32


class _Units(NamedTuple):
    """A contestant (see collectives/bench/kit/turns.py)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: torch.Tensor
    setup: TrainingSetup

    def turn(self, round_: int) -> Seconds:
        self.setup.comm.barrier()
        clock = DeviceStepClock(self.setup.device)
        self.model(self.x).square().mean().backward()
        clock.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        passes, step = clock.seconds()
        return {"passes": passes, "step": step}


def overhead(setup: TrainingSetup, *, steps: int) -> HookOverhead:
    """Time `steps` steps of the sharded and of the plain model, in turn. Collective."""
    alone = setup.comm.split(setup.comm.rank)
    models = {name: _model(UNITS, setup.device) for name in ("sharded", "plain")}
    for module in (*models["sharded"], models["sharded"]):
        fully_shard(module, alone, units="one")
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0)).to(setup.device)
    contestants = {
        name: _Units(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True), x, setup)
        for name, model in models.items()
    }
    series = take_turns(contestants, rounds=steps, warm_up=WARM_UP)
    # Ranks are independent: the median of each rank first, then the slowest rank's median.
    medians = slowest(setup.comm, {key: np.array(spread(seconds)[0]) for key, seconds in series.items()})
    return HookOverhead(
        UNITS, *(float(medians[name, part]) for part in ("passes", "step") for name in ("sharded", "plain"))
    )


def _model(units: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(units))).to(device)
