"""What the families of models share: the forward from tokens to logits or the loss, around the body of each family.

The modules are plain torch without sharding or ranks, so any training loop can use them. Shapes in the code of this folder:
B sequences, L tokens per sequence, C width, H heads, D width of a head, V vocabulary. The numbers and named sizes are in `sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mpitrain.models.loss import Reduction, loss_of, make_loss
from mpitrain.models.segments import Segments
from mpitrain.models.sizes import TransformerConfig
from mpitrain.placement.fills import Init
from mpitrain.plans.stage_plan import StagePlan
from mpitrain.tensor.plan import Style


class LanguageModel(nn.Module):
    """A decoder-only transformer. It has torch's default values until `mpitrain.initialize` sets the values of `init_rule`.

    A family makes its modules, the embedding `wte` and the list `blocks` among them, and calls `end`. It defines `embed`, `body`,
    `tensor_plan`, `stage_plan` and `init_rule`. Under `torch.device("meta")` its construction needs neither memory nor time.
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
        self.loss = make_loss()

    def embed(self, tokens_BL: torch.Tensor, segments: Segments | None) -> torch.Tensor:  # noqa: N803
        """(B, L) int64 -> (B, L, C): the stream before the first block."""
        raise NotImplementedError

    def body(self, x_BLC: torch.Tensor, segments: Segments | None) -> torch.Tensor:  # noqa: N803
        """(B, L, C) -> (B, L, C): the blocks, and the norm after them."""
        raise NotImplementedError

    def forward(
        self,
        tokens_BL: torch.Tensor | None = None,  # noqa: N803
        targets_BL: torch.Tensor | None = None,  # noqa: N803
        *,
        reduction: Reduction = "mean",
        segments: Segments | None = None,
        stream_BLC: torch.Tensor | None = None,  # noqa: N803
    ) -> torch.Tensor:
        """The logits of the next token, or the loss.

        Args:
            tokens_BL: (B, L) int64, L at most the context.
            targets_BL: (B, L) int64, for each token the next token; positions with -100 (`loss.IGNORED`) do not count.
            reduction: the loss is the "mean" or the "sum" over the positions that count.
            segments: the documents of the rows: a token attends to earlier tokens of its own document alone, and positions begin at 0
                with each document. None: each row is one.
            stream_BLC: (B, L, C) in place of tokens: the output of `embed`, or of an earlier stage of a pipeline.

        Returns:
            Without targets: logits (B, L, V) in the parameters' dtype. With targets: the cross-entropy in nats, a float32
            scalar (the mean is NaN, and the sum 0, if no position counts).

        Raises:
            ValueError: more tokens than the context, segments of rows of another shape, or another reduction.
        """
        if (tokens_BL is None) == (stream_BLC is None):
            raise ValueError("expected either tokens or a stream")
        given = tokens_BL if tokens_BL is not None else stream_BLC
        if segments is not None and given is not None and segments.positions.shape != given.shape[:2]:
            rows, of = tuple(given.shape[:2]), tuple(segments.positions.shape)
            raise ValueError(f"segments: expected those of rows of shape {rows}, got {of}")
        if tokens_BL is not None:
            if (length := tokens_BL.shape[1]) > self.config.context:
                raise ValueError(f"expected at most model.context = {self.config.context} tokens, got {length}")
            stream_BLC = self.embed(tokens_BL, segments)  # noqa: N806
        assert stream_BLC is not None
        logits_BLV = self.head(self.body(stream_BLC, segments))  # noqa: N806
        if targets_BL is None:
            return self.logits(logits_BLV)
        return loss_of(self.loss, logits_BLV, targets_BL, reduction)

    @property
    def tensor_plan(self) -> Mapping[str, Style]:
        """How `tensor_parallel` cuts the model."""
        raise NotImplementedError

    @property
    def stage_plan(self) -> StagePlan:
        """How `pipeline` divides the model into stages."""
        raise NotImplementedError

    def init_rule(self, name: str) -> Init:
        """The distribution of the initial values of a parameter."""
        raise NotImplementedError
