"""Times the steps of all layouts in turn."""

from collections.abc import Mapping

import torch

from collectives import Communicator
from collectives.bench.kit.turns import slowest, spread, take_turns
from mpitrain.job.config import Config
from mpitrain.tools.plan.measuring.steps import WARM_UP, TrainedSteps


def measured(
    configs: Mapping[str, Config], comm: Communicator, device: torch.device, *, steps: int
) -> dict[str, tuple[float, float, float]]:
    """Median, minimum and maximum of the slowest rank's seconds of a step, by layout; the same on all ranks. Collective."""
    contestants = {name: TrainedSteps(config, comm, device) for name, config in configs.items()}
    series = slowest(comm, take_turns(contestants, rounds=steps, warm_up=WARM_UP))
    return {name: spread(series[name, "step"]) for name in configs}
