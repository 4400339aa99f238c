"""Seconds of one rank for one block of a transformer, and for the head, in one micro-batch.

Letters of the paper on activations (Korthikanti et al. 2022, 2205.05198): a token has `width` numbers between the matrices of a block.
Tensor parallelism cuts what is within the matrices; sequence parallelism cuts what is between them.
"""

from functools import lru_cache
from typing import NamedTuple

from mpitrain.plan.layout import Layout, Software
from mpitrain.plan.links import Sent, exchange, gather, group
from mpitrain.plan.machine import Machine
from mpitrain.plan.transformer import Transformer

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


class Block(NamedTuple):
    """Seconds. `forward` and `backward` are without communication; `weights` is the part of `backward` for gradients of weights."""

    forward: float
    backward: float
    weights: float
    again: float
    """What is computed again in the backward, with its communication."""
    tensor: Sent
    """Of the forward; the backward's is equal."""
    context: Sent
    """Of the forward that is not hidden by attention; the backward's is twice this."""
    experts: Sent
    """Of the forward; the backward's is equal."""

    @property
    def sent_forward(self) -> float:
        return self.tensor.seconds + self.context.seconds + self.experts.seconds

    @property
    def sent_backward(self) -> float:
        return self.tensor.seconds + 2 * self.context.seconds + self.experts.seconds


def product_s(machine: Machine, rows: float, inner: float, columns: float, count: float = 1) -> float:
    """`count` matrix products (rows x inner) (inner x columns). Reading and writing adds to computing: kernels hide only a part."""
    flops = 2 * rows * inner * columns
    nbytes = machine.element_bytes * (rows * inner + inner * columns + rows * columns)
    return count * (flops / _flops(machine) + nbytes / _stream(machine)) + machine.launch_s


def _flops(machine: Machine) -> float:
    return machine.flops * machine.efficiency.product


def _stream(machine: Machine) -> float:
    return machine.memory_bandwidth * machine.efficiency.stream


@lru_cache(maxsize=4096)
def block(
    model: Transformer,
    machine: Machine,
    software: Software,
    tensor: int,
    context: int,
    experts: int,
    micro: int,
    sequence: bool,
    recompute: str,
) -> Block:
    """The seconds of one block; the arguments are those fields of a `Layout` on which they depend."""
    tokens = micro * model.context / context  # of this rank
    width, heads, head = model.width, model.heads / tensor, model.head_width
    kv_heads = max(model.kv_heads / tensor, 1)
    inner, tokens_of_experts = model.inner / tensor, tokens * model.experts_per_token
    columns_up = (2 if model.gated else 1) * inner
    projections = product_s(machine, tokens, width, (heads + 2 * kv_heads) * head)
    projections += product_s(machine, tokens, heads * head, width)
    products = projections + product_s(machine, tokens_of_experts, width, columns_up)
    products += product_s(machine, tokens_of_experts, inner, width)
    attention = _attention_s(model, machine, software, tokens, heads)
    between = tokens * width * machine.element_bytes / _stream(machine) / (tensor if sequence else 1)
    within = tokens * machine.element_bytes / _stream(machine)
    gelu = SWIGLU if model.gated else GELU
    streams = [
        between * (NORMS[i] + RESIDUALS[i] + MASKS[i] * software.dropout)
        + within * (HEADS[i] * heads * head + gelu[i] * inner * model.experts_per_token)
        + (8 + 4 * i) * machine.launch_s
        for i in (0, 1)
    ]
    nbytes = tokens * width * machine.element_bytes
    of_tensor = group(machine, tensor, 1)
    in_tensor = gather(machine, nbytes, of_tensor, joins_adapters=software.joins_adapters).times(4)
    around = _context(model, machine, context, tensor, tokens, kv_heads, hidden_by=attention[0])
    to_experts = Sent()
    if model.experts > 1:
        to_experts = exchange(machine, nbytes * model.experts_per_token, group(machine, experts, tensor)).times(2)
    forward = products + attention[0] + streams[0]
    sent = in_tensor.seconds + around.seconds + to_experts.seconds
    around_attention = projections + in_tensor.seconds / 2 if software.recomputes_projections else 0.0
    again = {"none": 0.0, "attention": attention[0] + around_attention, "block": forward + sent}[recompute]
    return Block(forward, 2 * products + attention[1] + streams[1], products, again, in_tensor, around, to_experts)


def _attention_s(
    model: Transformer, machine: Machine, software: Software, tokens: float, heads: float
) -> tuple[float, float]:
    """Seconds of the attention's core, forward and backward."""
    keys, head = model.context, model.head_width
    flops = 4 * tokens * keys * heads * head
    if software.fused_attention:
        # The masked half is left out. The backward computes five products in place of two (FlashAttention-2, 2307.08691, section 3.1).
        forward = flops / 2 / (machine.flops * machine.efficiency.attention)
        return forward, 2.5 * forward
    rows = tokens * heads
    products = 2 * product_s(machine, keys, head, keys, count=rows / keys)
    scores = rows * keys * machine.element_bytes / _stream(machine)
    forward = products + SCORES[0] * scores
    return forward, 2 * products + SCORES[1] * scores


def _context(
    model: Transformer, machine: Machine, context: int, tensor: int, tokens: float, kv_heads: float, hidden_by: float
) -> Sent:
    """Keys and values of the other ranks, which arrive while attention with earlier ones is computed."""
    if context == 1:
        return Sent()
    nbytes = 2 * tokens * kv_heads * model.head_width * machine.element_bytes * context
    sent = gather(machine, nbytes, group(machine, context, tensor))
    first = sent.seconds / context  # nothing can hide the first part
    return sent._replace(seconds=max(sent.seconds - hidden_by, first))


def block_of(model: Transformer, machine: Machine, software: Software, layout: Layout) -> Block:
    """The seconds of one block in a layout."""
    return block(
        model,
        machine,
        software,
        layout.tensor,
        layout.context,
        layout.experts,
        layout.micro,
        layout.sequence,
        layout.recompute,
    )


@lru_cache(maxsize=4096)
def head_s(model: Transformer, machine: Machine, tensor: int, context: int, micro: int) -> tuple[float, float]:
    """Seconds of the head and the loss, forward and backward. The loss is computed in fp32."""
    tokens, classes = micro * model.context / context, model.vocab / tensor
    product = product_s(machine, tokens, model.width, classes)
    stream = tokens * classes / _stream(machine)
    return product + 10 * stream, 2 * product + 10 * stream
