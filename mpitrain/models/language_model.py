"""What the families of models share: the forward from tokens to logits or the loss, around the body of each family.

The modules are plain torch without sharding or ranks, so any training loop can use them. Shapes in the code of this folder:
B sequences, L tokens per sequence, C width, H heads, D width of a head, V vocabulary. The numbers and named sizes are in `sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mpitrain.init import Init
from mpitrain.models.sizes import TransformerConfig
from mpitrain.tensor.plan import Style


class LanguageModel(nn.Module):
    """A decoder-only transformer. It has torch's default values until `mpitrain.init.initialize` sets the values of `init_rule`.

    A family makes its modules, the embedding `wte` and the list `blocks` among them, and calls `end`. It defines `body`,
    `tensor_plan` and `init_rule`. Under `torch.device("meta")` its construction needs neither memory nor time.
    """

    wte: nn.Embedding
    blocks: nn.ModuleList

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def end(self) -> None:
        """Make the last modules: the head, the logits and the loss."""
        config = self.config
        # Tied: the next lines replace the weight made here, so it is on the meta device and needs no memory.
        self.head = nn.Linear(config.width, config.vocab, bias=False, device="meta" if config.tied else None)
        if config.tied:
            self.head.weight = self.wte.weight
        self.logits = nn.Identity()
        self.loss = nn.CrossEntropyLoss(ignore_index=-100)

    def body(self, tokens_BL: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """(B, L) int64 -> (B, L, C): all of the model before the head."""
        raise NotImplementedError

    def forward(self, tokens_BL: torch.Tensor, targets_BL: torch.Tensor | None = None) -> torch.Tensor:  # noqa: N803
        """The logits of the next token, or the loss.

        Args:
            tokens_BL: (B, L) int64, L at most the context.
            targets_BL: (B, L) int64, for each token the next token; the loss ignores positions with -100.

        Returns:
            Without targets: logits (B, L, V) in the parameters' dtype. With targets: the mean cross-entropy in nats per
            counted token, a float32 scalar (NaN if all targets are -100).

        Raises:
            ValueError: more tokens than the context.
        """
        length = tokens_BL.shape[1]
        if length > self.config.context:
            raise ValueError(f"expected at most model.context = {self.config.context} tokens, got {length}")
        logits_BLV = self.head(self.body(tokens_BL))  # noqa: N806
        if targets_BL is None:
            return self.logits(logits_BLV)
        return self.loss(logits_BLV.float().flatten(0, 1), targets_BL.flatten())

    @property
    def tensor_plan(self) -> Mapping[str, Style]:
        """How `tensor_parallel` cuts the model."""
        raise NotImplementedError

    def init_rule(self, name: str) -> Init:
        """The distribution of the initial values of a parameter."""
        raise NotImplementedError
