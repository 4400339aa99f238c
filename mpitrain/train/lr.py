"""The learning rate as a function of the step."""

import math

from mpitrain.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate of step 0, ..., steps - 1: a linear warm-up to `lr`, then a cosine to `lr * min_lr_ratio` (Loshchilov and Hutter 2017)."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(steps - 1 - config.warmup_steps, 1), 1.0)
    lowest = config.lr * config.min_lr_ratio
    return lowest + (config.lr - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
