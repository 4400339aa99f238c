"""The Llama: a decoder-only transformer like Llama 2 (Touvron et al. 2023, 2307.09288) and Llama 3 (Llama team 2024, 2407.21783).

It is pre-norm, with RMS norms (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), grouped queries (Ainslie et al. 2023) and
feed-forward layers with SwiGLU (Shazeer 2020), and without biases. It does not scale positions, as Llama 3.1 does for long contexts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mpitrain.models.language_model import LanguageModel
from mpitrain.models.segments import Segments, attend
from mpitrain.models.sizes import RMS_EPS, LlamaConfig
from mpitrain.placement.fills import Constant, Init, Normal
from mpitrain.plans.stage_plan import StagePlan
from mpitrain.tensor.plan import Style


class Rotation:
    """Turns queries and keys by angles that grow with the position: their products depend on the distance of two tokens alone.

    The numbers i and i + D/2 of a head are a pair, as in transformers' Llama. Its angle is position / theta^(2i/D). An object of this
    class is no tensor, so that mixed precision does not cast the angles with a block's arguments: they need float32.
    """

    def __init__(self, positions: torch.Tensor, head_width: int, theta: float) -> None:
        """positions: (L,) of all rows, or (B, 1, L)."""
        pairs = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32)
        angles = positions.to(torch.float32)[..., None] * theta ** -(pairs / head_width)
        self.cos, self.sin = angles.cos(), angles.sin()  # (..., L, D/2)

    def __call__(self, x_BHLD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """(B, H, L, D) -> (B, H, L, D), computed in float32, of the same dtype."""
        left, right = x_BHLD.chunk(2, dim=-1)
        turned = left * self.cos - right * self.sin, right * self.cos + left * self.sin
        return torch.cat(turned, dim=-1).to(x_BHLD.dtype)


class LlamaAttention(nn.Module):
    """Causal self-attention, in which several heads of queries share a head of keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.kv = nn.Linear(config.width, 2 * config.kv_heads * self.head_width, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self,
        x_BLC: torch.Tensor,  # noqa: N803
        rotation: Rotation,
        segments: Segments | None = None,
    ) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        b, l, _ = x_BLC.shape  # noqa: E741
        # H is a number of heads of its own for queries and for keys, or a rank's part of it.
        q_BHLD = self.q(x_BLC).view(b, l, -1, self.head_width).transpose(1, 2)  # noqa: N806
        kv = self.kv(x_BLC).view(b, l, 2, -1, self.head_width)
        k_BHLD, v_BHLD = kv.permute(2, 0, 3, 1, 4).unbind()  # noqa: N806
        return self.proj(attend(rotation(q_BHLD), rotation(k_BHLD), v_BHLD, segments))


class LlamaMLP(nn.Module):
    """SwiGLU: one half of the inner features, after SiLU, multiplies the other half."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.proj = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    """One layer, and one unit of sharding: attention, then MLP; each reads the normed residual stream and adds its output to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, RMS_EPS)
        self.attn = LlamaAttention(config)
        self.norm2 = nn.RMSNorm(config.width, RMS_EPS)
        self.mlp = LlamaMLP(config)

    def forward(self, x: torch.Tensor, rotation: Rotation, segments: Segments | None = None) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        x = x + self.attn(self.norm1(x), rotation, segments=segments)
        return x + self.mlp(self.norm2(x))


# The names that users see in errors and printed models, and write in `keep_fp32`, are those of a GPT's parts.
LlamaAttention.__name__, LlamaMLP.__name__, LlamaBlock.__name__ = "Attention", "MLP", "Block"


class Llama(LanguageModel):
    """The Llama: rotary positions, RMS norms, grouped queries, feed-forward layers with SwiGLU."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, RMS_EPS)
        self.end()

    def embed(self, tokens_BL: torch.Tensor, segments: Segments | None) -> torch.Tensor:  # noqa: N803
        """(B, L) int64 -> (B, L, C)."""
        return self.wte(tokens_BL)

    def body(self, x_BLC: torch.Tensor, segments: Segments | None) -> torch.Tensor:  # noqa: N803
        """(B, L, C) -> (B, L, C)."""
        length, device = x_BLC.shape[1], x_BLC.device
        positions = torch.arange(length, device=device) if segments is None else segments.positions[:, None]
        rotation = Rotation(positions, self.config.width // self.config.heads, self.config.theta)
        for block in self.blocks:
            x_BLC = block(x_BLC, rotation, segments=segments)  # noqa: N806
        return self.norm(x_BLC)

    @property
    def tensor_plan(self) -> dict[str, Style]:
        """How `tensor_parallel` cuts the model. With grouped queries all ranks have the same number of heads."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        is_even = kv_heads < heads
        return {
            "wte": Style("vocabulary"),
            "blocks.*.attn.q": Style("column", blocks=heads, is_even=is_even),
            "blocks.*.attn.kv": Style("column", parts=2, blocks=kv_heads, is_shared=True, is_even=is_even),
            "blocks.*.attn.proj": Style("row", blocks=heads, is_even=is_even),
            "blocks.*.mlp.gate_up": Style("column", parts=2),
            "blocks.*.mlp.proj": Style("row"),
            "head": Style("column"),
            "logits": Style("gather"),
            "loss": Style("loss"),
        }

    @property
    def stage_plan(self) -> StagePlan:
        """How `pipeline` divides the model into stages."""
        return StagePlan(
            first=("wte",),
            blocks="blocks",
            last=("norm", "head", "logits", "loss"),
            stream="stream_BLC",
            input="tokens_BL",
        )

    def init_rule(self, name: str) -> Init:
        """As in the GPT: weights normal with std 0.02 (projections 0.02 / sqrt(2 * layers)), norms 1."""
        *_, module, _ = name.split(".")
        if module in ("norm1", "norm2", "norm"):
            return Constant(1.0)
        return Normal(0.02 / math.sqrt(2 * self.config.layers) if module == "proj" else 0.02)
