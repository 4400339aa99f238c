"""The GPT: a decoder-only transformer as GPT-2's (Radford et al. 2019), pre-norm, with learned positions.

Plain torch, and nothing of sharding or ranks: it trains as well in a loop of one's own. Shapes in the code:
B sequences, L tokens of each, C width, H heads, V vocabulary. Its numbers and named sizes stand in `sizes`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mpitrain.init import Constant, Init, Normal
from mpitrain.models.sizes import GPTConfig


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x_BLC: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """(B, L, C) -> (B, L, C)."""
        b, l, c = x_BLC.shape  # noqa: E741
        qkv = self.qkv(x_BLC).view(b, l, 3, self.heads, c // self.heads)
        q_BHLD, k_BHLD, v_BHLD = qkv.permute(2, 0, 3, 1, 4).unbind()  # noqa: N806
        y_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)  # noqa: N806
        return self.proj(y_BHLD.transpose(1, 2).reshape(b, l, c))


class MLP(nn.Module):
    """Two linear layers, four times as wide between them, with a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer: attention, then MLP, each on a normed copy of the stream and added to it. The unit of sharding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """The model. Its values are torch's defaults until `mpitrain.init.initialize` gives it those of `init_rule`.

    Under `torch.device("meta")` it costs neither memory nor time.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        # Tied: the weight made here is replaced at once; on the meta device it costs nothing until then.
        self.head = nn.Linear(config.width, config.vocab, bias=False, device="meta" if config.tied else None)
        if config.tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor | None = None) -> torch.Tensor:  # noqa: N803
        """Logits of the next token, or their loss.

        Args:
            tokens_BL: (B, L) int64, L at most the context.
            targets_BL: (B, L) int64, the token after each one; -100 where it does not count.

        Returns:
            Without targets: logits (B, L, V) in the parameters' dtype. With targets: the mean cross-entropy in nats per
            counted token, a float32 scalar (NaN if none counts).

        Raises:
            ValueError: more tokens than the context.
        """
        length = tokens_BL.shape[1]
        if length > self.config.context:
            raise ValueError(f"expected at most model.context = {self.config.context} tokens, got {length}")
        x_BLC = self.wte(tokens_BL) + self.wpe(torch.arange(length, device=tokens_BL.device))  # noqa: N806
        for block in self.blocks:
            x_BLC = block(x_BLC)  # noqa: N806
        logits_BLV = self.head(self.ln_f(x_BLC))  # noqa: N806
        if targets_BL is None:
            return logits_BLV
        return F.cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten(), ignore_index=-100)

    def init_rule(self, name: str) -> Init:
        """GPT-2's initial values: normal 0.02; projections into the stream less, by the number added; norms 1, biases 0."""
        *_, module, kind = name.split(".")
        if kind == "bias":
            return Constant(0.0)
        if module in ("ln1", "ln2", "ln_f"):
            return Constant(1.0)
        return Normal(0.02 / math.sqrt(2 * self.config.layers) if module == "proj" else 0.02)
