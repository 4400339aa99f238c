"""The families of models."""

from __future__ import annotations

from mpitrain.models.gpt import GPT
from mpitrain.models.language_model import LanguageModel
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import GPTConfig, LlamaConfig, TransformerConfig


def build(config: TransformerConfig) -> LanguageModel:
    """The model of the family whose numbers these are, with torch's default values. TypeError for other numbers."""
    if isinstance(config, LlamaConfig):
        return Llama(config)
    if isinstance(config, GPTConfig):
        return GPT(config)
    raise TypeError(f"expected a GPTConfig or a LlamaConfig, got {type(config).__name__}")
