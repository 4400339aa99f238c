"""The GPT: a decoder-only transformer like GPT-2 (Radford et al. 2019), pre-norm, with learned positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mpitrain.models.language_model import LanguageModel
from mpitrain.models.segments import Segments, attend
from mpitrain.models.sizes import GPTConfig
from mpitrain.placement.fills import Constant, Init, Normal
from mpitrain.plans.stage_plan import StagePlan
from mpitrain.tensor.plan import Style


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x_BLC: torch.Tensor, segments: Segments | None = None) -> torch.Tensor:  # noqa: N803
        """(B, L, C) -> (B, L, C)."""
        b, l, c = x_BLC.shape  # noqa: E741
        qkv = self.qkv(x_BLC).view(b, l, 3, -1, c // self.heads)  # H may be a rank's part of the heads
        q_BHLD, k_BHLD, v_BHLD = qkv.permute(2, 0, 3, 1, 4).unbind()  # noqa: N806
        return self.proj(attend(q_BHLD, k_BHLD, v_BHLD, segments))


class MLP(nn.Module):
    """Two linear layers with a GELU between them; the hidden width is four times the outer width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer, and one unit of sharding: attention, then MLP; each reads the normed residual stream and adds its output to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, segments: Segments | None = None) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        x = x + self.attn(self.ln1(x), segments=segments)
        return x + self.mlp(self.ln2(x))


class GPT(LanguageModel):
    """The GPT: learned positions, layer norms, feed-forward layers with GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.end()

    def embed(self, tokens_BL: torch.Tensor, segments: Segments | None) -> torch.Tensor:  # noqa: N803
        """(B, L) int64 -> (B, L, C)."""
        length, device = tokens_BL.shape[1], tokens_BL.device
        positions = torch.arange(length, device=device) if segments is None else segments.positions
        return self.wte(tokens_BL) + self.wpe(positions)

    def body(self, x_BLC: torch.Tensor, segments: Segments | None) -> torch.Tensor:  # noqa: N803
        """(B, L, C) -> (B, L, C)."""
        for block in self.blocks:
            x_BLC = block(x_BLC, segments=segments)  # noqa: N806
        return self.ln_f(x_BLC)

    @property
    def tensor_plan(self) -> dict[str, Style]:
        """How `tensor_parallel` cuts the model."""
        heads = self.config.heads
        return {
            "wte": Style("vocabulary"),
            "blocks.*.attn.qkv": Style("column", parts=3, blocks=heads, is_even=False),
            "blocks.*.attn.proj": Style("row", blocks=heads, is_even=False),
            "blocks.*.mlp.fc": Style("column"),
            "blocks.*.mlp.proj": Style("row"),
            "head": Style("column"),
            "logits": Style("gather"),
            "loss": Style("loss"),
        }

    @property
    def stage_plan(self) -> StagePlan:
        """How `pipeline` divides the model into stages."""
        return StagePlan(
            first=("wte", "wpe"),
            blocks="blocks",
            last=("ln_f", "head", "logits", "loss"),
            stream="stream_BLC",
            input="tokens_BL",
        )

    def init_rule(self, name: str) -> Init:
        """GPT-2's initial values: weights normal with std 0.02 (projections 0.02 / sqrt(2 * layers)), norms 1, biases 0."""
        *_, module, kind = name.split(".")
        if kind == "bias":
            return Constant(0.0)
        if module in ("ln1", "ln2", "ln_f"):
            return Constant(1.0)
        return Normal(0.02 / math.sqrt(2 * self.config.layers) if module == "proj" else 0.02)
