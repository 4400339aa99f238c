"""The learning rate as a function of the step."""

import math
from collections.abc import Callable

from mpitrain.job.config import Config

_DECAY_RATIO = 0.2  # Hägele et al. 2024: a fall in 20 % of the steps reaches the loss of a cosine

_FALLS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),  # Loshchilov and Hutter 2017
    "linear": lambda progress: 1 - progress,
    # The schedule: Hu et al. 2024; this form of the fall: Hägele et al. 2024.
    "wsd": lambda progress: 1 - math.sqrt(progress),
    "constant": lambda progress: 1.0,
}
"""By schedule: the share of the way from the lowest to the highest rate, from 1 to 0 as the progress goes from 0 to 1."""


def learning_rate(config: Config, step: int) -> float:
    """Rate of step 0, ..., train.steps - 1: a linear warm-up to the highest rate, then the schedule down to `min_lr_ratio` of it."""
    optim, last, highest, warmup = config.optim, config.train.steps - 1, highest_rate(config), warmup_steps(config)
    if step < warmup:
        return highest * (step + 1) / warmup
    begin = warmup
    if optim.schedule == "wsd":
        falling = round(last * (_DECAY_RATIO if optim.decay_ratio is None else optim.decay_ratio))
        begin = max(warmup, last - max(falling, 1))
    progress = min(max(step - begin, 0) / max(last - begin, 1), 1.0)
    lowest = highest * optim.min_lr_ratio
    return lowest + (highest - lowest) * _FALLS[optim.schedule](progress)


def highest_rate(config: Config) -> float:
    """The highest learning rate, scaled with the batch: linearly (Goyal et al. 2017) or with its root, which suits optimizers that
    divide by the size of gradients (Hoffer et al. 2017, Malladi et al. 2022)."""
    optim, lr = config.optim, config.optim.resolve().lr
    if optim.base_batch is None:
        return lr
    factor = config.train.batch / optim.base_batch
    return lr * (factor if optim.lr_scaling == "linear" else math.sqrt(factor))


def warmup_steps(config: Config) -> int:
    """Steps of the warm-up."""
    tokens_of_step = config.train.batch * config.model.resolve().context
    return -(-config.optim.warmup_tokens // tokens_of_step) if config.optim.warmup_tokens else config.optim.warmup_steps
