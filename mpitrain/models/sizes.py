"""The numbers of the models: those of each family, the named sizes, and the counts of parameters and FLOPs. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class TransformerConfig(ABC):
    """The numbers that make a decoder-only transformer of any family.

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

    @property
    @abstractmethod
    def block_parameters(self) -> int:
        """Number of parameters of one block."""

    @property
    @abstractmethod
    def norm_parameters(self) -> int:
        """Number of parameters of one norm."""

    @property
    @abstractmethod
    def position_parameters(self) -> int:
        """Number of parameters of the positions."""


class GPTConfig(TransformerConfig):
    """The numbers that make a GPT."""

    @property
    def block_parameters(self) -> int:
        """Two norms, query, key, value and projection, and two layers of four widths; all with biases."""
        width = self.width
        attention = (width * 3 * width + 3 * width) + (width * width + width)
        mlp = (width * 4 * width + 4 * width) + (4 * width * width + width)
        return 2 * self.norm_parameters + attention + mlp

    @property
    def norm_parameters(self) -> int:
        """Scales and biases."""
        return 2 * self.width

    @property
    def position_parameters(self) -> int:
        """A vector for each position."""
        return self.context * self.width


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """The numbers that make a Llama.

    Raises:
        ValueError: also kv_heads that do not divide the heads, or an odd width of a head.
    """

    tied: bool = False
    """The head shares the embedding's weight."""
    kv_heads: int = 0
    """Heads of keys and values; each serves heads / kv_heads heads of queries. 0: as many as heads."""
    inner: int = 0
    """Inner width of the feed-forward layer. 0: two thirds of 4 x width, rounded up to a multiple of 64."""
    theta: float = 10000.0
    """The wavelengths of the rotary positions grow from 2 pi to almost 2 pi x theta tokens."""

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.inner:
            object.__setattr__(self, "inner", 64 * -(-8 * self.width // (3 * 64)))
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads: expected a divisor of model.heads = {self.heads}, got {self.kv_heads}: each head of keys and "
                "values serves the same number of heads of queries"
            )
        if self.width // self.heads % 2:
            raise ValueError(
                f"model.width: expected a multiple of 2 x model.heads = {2 * self.heads}, because rotary positions turn "
                f"pairs of numbers, got {self.width}"
            )

    @property
    def block_parameters(self) -> int:
        """Two norms, query and projection, key and value, and three matrices of the feed-forward layer; without biases."""
        keys = self.kv_heads * (self.width // self.heads)
        attention = 2 * self.width * self.width + 2 * self.width * keys
        return 2 * self.norm_parameters + attention + 3 * self.width * self.inner

    @property
    def norm_parameters(self) -> int:
        """Scales alone."""
        return self.width

    @property
    def position_parameters(self) -> int:
        """Rotary positions have none."""
        return 0


RMS_EPS = 1e-5
"""Added to the mean square in the norms of a Llama, as in Llama 2 and 3."""

_CONFIGS: dict[str, type[TransformerConfig]] = {"gpt": GPTConfig, "llama": LlamaConfig}
_LLAMA_3 = {"vocab": 128256, "context": 8192, "theta": 500000.0}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {
        # 1.4 M parameters: two cores train it in two minutes. In this time many small steps reach a lower loss than few large steps.
        "tiny": {"vocab": 256, "context": 128, "width": 192, "layers": 3, "heads": 3},
        # The four sizes of GPT-2 (Radford et al. 2019): 124 M, 355 M, 774 M and 1558 M parameters with the head tied.
        "small": {"vocab": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12},
        "medium": {"vocab": 50257, "context": 1024, "width": 1024, "layers": 24, "heads": 16},
        "large": {"vocab": 50257, "context": 1024, "width": 1280, "layers": 36, "heads": 20},
        "xl": {"vocab": 50257, "context": 1024, "width": 1600, "layers": 48, "heads": 25},
    },
    "llama": {
        # 1.4 M parameters, as the GPT's tiny. 2 or 4 ranks share the heads equally, which grouped queries need.
        "tiny": {"vocab": 256, "context": 128, "width": 192, "layers": 3, "heads": 4},
        # Llama 3.2 1B (meta-llama/Llama-3.2-1B, config.json): 1.24 B parameters. The context of Llama 3 is that of its first, longest
        # stage of training (Llama team 2024, 2407.21783, 3.4.1). The later stages scale the positions; this model does not.
        "1b": {"width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "inner": 8192, "tied": True, **_LLAMA_3},
        # Llama 2 7B (Touvron et al. 2023, 2307.09288; meta-llama/Llama-2-7b-hf, config.json): 6.74 B parameters.
        "7b": {"vocab": 32000, "context": 4096, "width": 4096, "layers": 32, "heads": 32, "inner": 11008},
        # Llama 3.1 8B and 70B (2407.21783, table 3): 8.03 B and 70.6 B parameters.
        "8b": {"width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "inner": 14336, **_LLAMA_3},
        "70b": {"width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "inner": 28672, **_LLAMA_3},
    },
}
"""The numbers of the named sizes of each family: `--model.family FAMILY --model.size NAME`."""


def resolve(size: str, family: str = "gpt", **numbers: float | None) -> TransformerConfig:
    """A named size with some of its numbers replaced; None keeps the number of the named size.

    `kv_heads` of a GPT is a number that must be equal to its heads.

    Raises:
        ValueError: an unknown name, or numbers that do not fit together.
    """
    if family not in SIZES:
        raise ValueError(f"model.family: expected one of {', '.join(SIZES)}, got {family!r}")
    if size not in SIZES[family]:
        others = [f"; --model.family {other} has this size" for other in SIZES if size in SIZES[other]]
        raise ValueError(f"model.size: expected one of {', '.join(SIZES[family])}, got {size!r}{''.join(others)}")
    given: dict[str, Any] = SIZES[family][size] | {k: number for k, number in numbers.items() if number is not None}
    if family == "gpt" and (count := given.pop("kv_heads", given["heads"])) != given["heads"]:
        raise ValueError(
            f"model.kv_heads: a GPT has as many key and value heads as heads, expected {given['heads']} or no number, got {count}; "
            "choose --model.family llama for grouped queries"
        )
    return _CONFIGS[family](**given)


def num_parameters(config: TransformerConfig) -> int:
    """Number of parameters of the model. Tied parameters count once."""
    vocabulary = config.vocab * config.width * (1 if config.tied else 2)
    blocks = config.layers * config.block_parameters
    return vocabulary + config.position_parameters + blocks + config.norm_parameters


def flops_per_token(config: TransformerConfig) -> int:
    """Floating-point operations per token of a full sequence, forward and backward, for the model's FLOP/s utilisation.

    6 N + 12 layers x width x context. N is the number of parameters without embeddings that are only looked up. Recomputed
    activations do not count either (PaLM, Chowdhery et al. 2022, appendix B).
    """
    looked_up = config.position_parameters + (0 if config.tied else config.vocab * config.width)
    return 6 * (num_parameters(config) - looked_up) + 12 * config.layers * config.width * config.context
