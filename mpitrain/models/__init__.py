"""The families of models, GPT and Llama, their named sizes, and sampling.

The import of this package does not import torch; the use of a model does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpitrain.models.sizes import (
    SIZES,
    GPTConfig,
    LlamaConfig,
    TransformerConfig,
    flops_per_token,
    num_parameters,
    resolve,
)

if TYPE_CHECKING:
    from mpitrain.models.decay import decay_groups, layer_groups, muon_groups
    from mpitrain.models.families import build
    from mpitrain.models.gpt import GPT
    from mpitrain.models.language_model import LanguageModel
    from mpitrain.models.llama import Llama
    from mpitrain.models.sampling import generate, sample_tokens
    from mpitrain.models.segments import Segments

__all__ = [
    "GPT",
    "SIZES",
    "GPTConfig",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "Segments",
    "TransformerConfig",
    "build",
    "decay_groups",
    "flops_per_token",
    "generate",
    "layer_groups",
    "muon_groups",
    "num_parameters",
    "resolve",
    "sample_tokens",
]

# Settings are checked against the named sizes before torch is loaded, which takes seconds on a cold file system.
_WITH_TORCH = {
    "GPT": "gpt",
    "LanguageModel": "language_model",
    "Llama": "llama",
    "Segments": "segments",
    "build": "families",
    "decay_groups": "decay",
    "generate": "sampling",
    "layer_groups": "decay",
    "muon_groups": "decay",
    "sample_tokens": "sampling",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
