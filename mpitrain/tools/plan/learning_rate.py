"""The learning rate for another batch size."""

import math
from typing import Literal, NamedTuple, get_args

Rule = Literal["sqrt", "linear", "none"]
RULES: dict[str, str] = {
    "sqrt": "square root: for Adam (Malladi et al. 2022, 2205.10287)",
    "linear": "linear: for SGD (Goyal et al. 2017, 1706.02677)",
    "none": "unchanged",
}
"""What happens to the learning rate if the batch grows, and for which optimizer this was shown."""


class LearningRate(NamedTuple):
    """Of a run with another batch than the one for which a learning rate is known."""

    rule: str
    lr: float
    warmup_steps: int | None
    """The warm-up takes the same number of tokens with each batch; None: unknown."""


def scaled(
    lr: float, from_batch: int, batch: int, rule: str, *, warmup_tokens: float | None = None, tokens_of_step: int = 1
) -> LearningRate:
    """The learning rate for `batch` sequences, if `lr` is good for `from_batch` sequences.

    Raises:
        ValueError: an unknown rule, or a number that is not positive.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"--lr-rule: expected one of {', '.join(RULES)}, got {rule!r}")
    for name, value in (("--lr", lr), ("--lr-batch", from_batch), ("--warmup-tokens", warmup_tokens)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {value:g}")
    ratio = batch / from_batch
    factor = {"sqrt": math.sqrt(ratio), "linear": ratio, "none": 1.0}[rule]
    steps = None if warmup_tokens is None else math.ceil(warmup_tokens / tokens_of_step)
    return LearningRate(rule, lr * factor, steps)
