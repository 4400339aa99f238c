"""The GPT: a decoder-only transformer like GPT-2 (Radford et al. 2019), pre-norm, with learned positions.

The module is plain torch without sharding or ranks, so any training loop can use it. Shapes in the code:
B sequences, L tokens per sequence, C width, H heads, V vocabulary. The numbers and named sizes are in `sizes`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mpitrain.init import Constant, Init, Normal
from mpitrain.models.loss import Reduction, loss_of, make_loss
from mpitrain.models.sizes import GPTConfig
from mpitrain.tensor.plan import Style


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x_BLC: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """(B, L, C) -> (B, L, C)."""
        b, l, c = x_BLC.shape  # noqa: E741
        qkv = self.qkv(x_BLC).view(b, l, 3, -1, c // self.heads)  # H may be a rank's part of the heads
        q_BHLD, k_BHLD, v_BHLD = qkv.permute(2, 0, 3, 1, 4).unbind()  # noqa: N806
        y_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)  # noqa: N806
        return self.proj(y_BHLD.transpose(1, 2).reshape(b, l, -1))


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, C) -> (B, L, C)."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """The model. It has torch's default values until `mpitrain.init.initialize` sets the values of `init_rule`.

    Under `torch.device("meta")` its construction needs neither memory nor time.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        # Tied: the next lines replace the weight made here, so it is on the meta device and needs no memory.
        self.head = nn.Linear(config.width, config.vocab, bias=False, device="meta" if config.tied else None)
        if config.tied:
            self.head.weight = self.wte.weight
        self.logits = nn.Identity()
        self.loss = make_loss()

    def forward(
        self,
        tokens_BL: torch.Tensor,  # noqa: N803
        targets_BL: torch.Tensor | None = None,  # noqa: N803
        *,
        reduction: Reduction = "mean",
    ) -> torch.Tensor:
        """The logits of the next token, or the loss.

        Args:
            tokens_BL: (B, L) int64, L at most the context.
            targets_BL: (B, L) int64, for each token the next token; positions with -100 (`loss.IGNORED`) do not count.
            reduction: the loss is the "mean" or the "sum" over the positions that count.

        Returns:
            Without targets: logits (B, L, V) in the parameters' dtype. With targets: the cross-entropy in nats, a float32
            scalar (the mean is NaN, and the sum 0, if no position counts).

        Raises:
            ValueError: more tokens than the context, or another reduction.
        """
        length = tokens_BL.shape[1]
        if length > self.config.context:
            raise ValueError(f"expected at most model.context = {self.config.context} tokens, got {length}")
        x_BLC = self.wte(tokens_BL) + self.wpe(torch.arange(length, device=tokens_BL.device))  # noqa: N806
        for block in self.blocks:
            x_BLC = block(x_BLC)  # noqa: N806
        logits_BLV = self.head(self.ln_f(x_BLC))  # noqa: N806
        if targets_BL is None:
            return self.logits(logits_BLV)
        return loss_of(self.loss, logits_BLV, targets_BL, reduction)

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

    def init_rule(self, name: str) -> Init:
        """GPT-2's initial values: weights normal with std 0.02 (projections 0.02 / sqrt(2 * layers)), norms 1, biases 0."""
        *_, module, kind = name.split(".")
        if kind == "bias":
            return Constant(0.0)
        if module in ("ln1", "ln2", "ln_f"):
            return Constant(1.0)
        return Normal(0.02 / math.sqrt(2 * self.config.layers) if module == "proj" else 0.02)
