"""The shape of a GPT: its numbers, the named sizes, and the counts of parameters and FLOPs. The module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class GPTConfig:
    """The numbers that make a GPT.

    Raises:
        ValueError: a number below 1, or a width that the heads do not divide.
    """

    vocab: int
    """Number of different tokens; 256 for bytes."""
    context: int
    """Longest sequence, in tokens: each token can attend to itself and to all tokens before it."""
    width: int
    """Length of a token's vector."""
    layers: int
    """Number of blocks."""
    heads: int
    """Attention heads per block; width / heads is a head's width."""
    tied: bool = True
    """The head shares the embedding's weight."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "tied" and value < 1:
                raise ValueError(f"model.{field.name}: expected at least 1, got {value}")
        if self.width % self.heads:
            below = self.width // self.heads * self.heads
            nearest = " or ".join(str(n) for n in (below, below + self.heads) if n)
            raise ValueError(
                f"model.width: expected a multiple of model.heads = {self.heads}, got {self.width}; nearest: {nearest}"
            )


SIZES = {
    # 1.4 M parameters: two cores train it in two minutes. In this time many small steps reach a lower loss than few large steps.
    "tiny": GPTConfig(vocab=256, context=128, width=192, layers=3, heads=3),
    # The four sizes of GPT-2 (Radford et al. 2019): 124 M, 355 M, 774 M and 1558 M parameters with the head tied.
    "small": GPTConfig(vocab=50257, context=1024, width=768, layers=12, heads=12),
    "medium": GPTConfig(vocab=50257, context=1024, width=1024, layers=24, heads=16),
    "large": GPTConfig(vocab=50257, context=1024, width=1280, layers=36, heads=20),
    "xl": GPTConfig(vocab=50257, context=1024, width=1600, layers=48, heads=25),
}
"""The named sizes: `--model.size NAME`."""


def resolve(size: str, **numbers: int | bool | None) -> GPTConfig:
    """A named size with some of its numbers replaced; None keeps the number of the named size.

    Raises:
        ValueError: an unknown name, or numbers that do not fit together.
    """
    if size not in SIZES:
        raise ValueError(f"model.size: expected one of {', '.join(SIZES)}, got {size!r}")
    given: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    return replace(SIZES[size], **given)


def num_parameters(config: GPTConfig) -> int:
    """Number of parameters of the model. Tied parameters count once."""
    width = config.width
    norm = 2 * width
    attention = (width * 3 * width + 3 * width) + (width * width + width)
    mlp = (width * 4 * width + 4 * width) + (4 * width * width + width)
    embeddings = config.vocab * width + config.context * width
    head = 0 if config.tied else config.vocab * width
    return embeddings + config.layers * (2 * norm + attention + mlp) + norm + head


def flops_per_token(config: GPTConfig) -> int:
    """Floating-point operations per token of a full sequence, forward and backward, for the model's FLOP/s utilisation.

    6 N + 12 layers x width x context. N is the number of parameters without embeddings that are only looked up. Recomputed
    activations do not count either (PaLM, Chowdhery et al. 2022, appendix B).
    """
    looked_up = config.context * config.width + (0 if config.tied else config.vocab * config.width)
    return 6 * (num_parameters(config) - looked_up) + 12 * config.layers * config.width * config.context
