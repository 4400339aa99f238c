"""Seconds of a rank's kernels: from shares of the machine's limits, or from times that were measured on it.

Pairs are of forward and backward. The two classes below have the same methods; `kernels_of` chooses one.
"""

from functools import lru_cache
from typing import NamedTuple, Protocol

from mpitrain.job.record.machine.constants import KernelConstants
from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.layout import Software
from mpitrain.tools.plan.transformer import Transformer

Pair = tuple[float, float]

# Reads and writes of kernels, in numbers of `width` for each token, from the operations of a block. Forward / backward.
NORMS = 2 * 2, 2 * 3
"""Two norms: read, write / read the input and the gradient, write."""
RESIDUALS = 2 * 3, 2 * 2
"""Two sums with the residual, each fused with bias and dropout: read both, write / add two gradients."""
MASKS = 2 * 0.5, 2 * 1.5
"""With dropout: two masks of one byte / read the mask and the gradient, write."""
HEADS = 4, 8
"""Queries, keys, values and outputs of attention heads change their order."""
GELU, SWIGLU = (2, 3), (3, 5)
"""Of `inner`."""
SCORES = 5, 6
"""Attention that is not fused, of the scores: scale, mask, softmax and dropout, each read and written."""
OPERATIONS = 8, 12
"""Of a block, without the products: each takes at least the time of the smallest operation."""
OPTIMIZER_BYTES = {2: 30, 4: 28}
"""Bytes that AdamW reads and writes for a parameter, by the bytes of a number in forward and backward: gradient, parameter in fp32 and
two moments, read; the last three and the parameter for the forward, written."""


class BlockPart(NamedTuple):
    """What a rank computes of a block. Numbers of tokens are those of a micro-batch."""

    tokens: float
    """Within the matrices."""
    sharers: int
    """Ranks that share the tokens between the matrices (sequence parallelism)."""
    heads: float
    """Of attention."""
    inner: float
    """Of the feed-forward layer."""


class KernelTimes(Protocol):
    """Seconds of kernels."""

    def product(self, rows: float, inputs: float, outputs: float) -> Pair:
        """A linear layer."""

    def attention(self, model: Transformer, software: Software, part: BlockPart) -> Pair:
        """The core of attention."""

    def elementwise(self, model: Transformer, software: Software, part: BlockPart) -> Pair:
        """The other kernels of a block."""

    def ends(self, model: Transformer, tokens: float, tensor: int) -> Pair:
        """The loss, and what else is before the first and after the last block, without the head's product."""

    def gradients(self, full: float, own: float, *, moves: int, adds: int) -> float:
        """What a step does with gradients besides reducing them.

        `full`: parameters of which the rank computes gradients; `own`: those whose reduced gradients it keeps. `moves`: how often all
        gradients move into a buffer; `adds`: how often those of `own` are added to earlier ones.
        """

    def optimizer(self, own: float) -> float:
        """Clipping and the optimizer's step, of `own` parameters."""


class OfLimits:
    """From shares of the machine's limits."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._stream = machine.memory_bandwidth * machine.efficiency.stream

    def product(self, rows: float, inputs: float, outputs: float) -> Pair:
        forward = self._product(rows, inputs, outputs)
        return forward, 2 * forward

    def _product(self, rows: float, inner: float, columns: float, count: float = 1) -> float:
        """`count` products (rows x inner) (inner x columns). Reading and writing adds to computing: kernels hide only a part."""
        machine = self._machine
        flops = 2 * rows * inner * columns
        nbytes = machine.element_bytes * (rows * inner + inner * columns + rows * columns)
        return count * (flops / (machine.flops * machine.efficiency.product) + nbytes / self._stream) + machine.launch_s

    def attention(self, model: Transformer, software: Software, part: BlockPart) -> Pair:
        machine, keys, head = self._machine, model.context, model.head_width
        flops = 4 * part.tokens * keys * part.heads * head
        if software.fused_attention:
            # The masked half is left out. The backward computes five products in place of two (FlashAttention-2, 2307.08691, section
            # 3.1).
            forward = flops / 2 / (machine.flops * machine.efficiency.attention)
            return forward, 2.5 * forward
        rows = part.tokens * part.heads
        products = 2 * self._product(keys, head, keys, count=rows / keys)
        scores = rows * keys * machine.element_bytes / self._stream
        return products + SCORES[0] * scores, 2 * products + SCORES[1] * scores

    def elementwise(self, model: Transformer, software: Software, part: BlockPart) -> Pair:
        machine = self._machine
        between = part.tokens * model.width * machine.element_bytes / self._stream / part.sharers
        within = part.tokens * machine.element_bytes / self._stream
        act = SWIGLU if model.gated else GELU
        forward, backward = (
            between * (NORMS[i] + RESIDUALS[i] + MASKS[i] * software.dropout)
            + within * (HEADS[i] * part.heads * model.head_width + act[i] * part.inner * model.experts_per_token)
            + OPERATIONS[i] * machine.launch_s
            for i in (0, 1)
        )
        return forward, backward

    def ends(self, model: Transformer, tokens: float, tensor: int) -> Pair:
        """The loss is computed in fp32."""
        stream = tokens * (model.vocab / tensor) / self._stream
        return 10 * stream, 10 * stream

    def gradients(self, full: float, own: float, *, moves: int, adds: int) -> float:
        """Little beside the reductions."""
        return 0.0

    def optimizer(self, own: float) -> float:
        return own * OPTIMIZER_BYTES[self._machine.element_bytes] / self._stream


class OfMeasurements:
    """From the section [kernels] of a machine file. The constants are those of a GPT's kernels; other activations take as much longer
    as they read and write more."""

    def __init__(self, machine: Machine, constants: KernelConstants, *, is_cut: bool) -> None:
        self._constants, self._is_cut = constants, is_cut
        self._copy_s = 2 * 4 / machine.memory_bandwidth
        """Of an fp32 number."""

    def product(self, rows: float, inputs: float, outputs: float) -> Pair:
        return self._constants.product_s(rows, inputs, outputs, is_cut=self._is_cut)

    def attention(self, model: Transformer, software: Software, part: BlockPart) -> Pair:
        return self._constants.attention_s(part.tokens, model.context, part.heads * model.head_width)

    def elementwise(self, model: Transformer, software: Software, part: BlockPart) -> Pair:
        of = self._constants
        act = SWIGLU if model.gated else GELU
        between, inner = part.tokens / part.sharers * model.width, part.tokens * part.inner * model.experts_per_token
        forward, backward = (
            between * (2 * of.norm_s[i] + 2 * of.residual_s)
            + inner * of.gelu_s[i] * act[i] / GELU[i]
            + OPERATIONS[i] * of.operation_s[i]
            for i in (0, 1)
        )
        return forward, backward

    def ends(self, model: Transformer, tokens: float, tensor: int) -> Pair:
        """With the last norm, the look-ups, and the gradients of the embeddings, which are dense."""
        of, logits = self._constants, tokens * model.vocab / tensor
        embeddings = (model.vocab / tensor + model.positions) * model.width
        forward = logits * of.loss_s[0] + tokens * model.width * (of.norm_s[0] + 2 * of.residual_s)
        backward = logits * of.loss_s[1] + tokens * model.width * (of.norm_s[1] + 2 * of.residual_s)
        return forward, backward + embeddings * of.add_s

    def gradients(self, full: float, own: float, *, moves: int, adds: int) -> float:
        return moves * full * self._copy_s + adds * own * self._constants.add_s

    def optimizer(self, own: float) -> float:
        """With the norm of the gradients, and their scaling, which the first steps of a training need nearly always."""
        return own * (self._constants.update_s + self._constants.grad_norm_s + self._copy_s)


@lru_cache(maxsize=64)
def kernels_of(machine: Machine, *, is_cut: bool) -> KernelTimes:
    """The times of a machine. `is_cut`: layers are cut over ranks or in stages, which compute products by another library."""
    if machine.kernels is None:
        return OfLimits(machine)
    return OfMeasurements(machine, machine.kernels, is_cut=is_cut)
