"""Seconds of one rank for one block of a transformer, and for the head, in one micro-batch.

Letters of the paper on activations (Korthikanti et al. 2022, 2205.05198): a token has `width` numbers between the matrices of a block.
Tensor parallelism cuts what is within the matrices; sequence parallelism cuts what is between them.
"""

from functools import lru_cache
from typing import NamedTuple

from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.kernels import BlockPart, kernels_of
from mpitrain.tools.plan.layout import RankLayout, Software
from mpitrain.tools.plan.links import Sent, exchange, gather, group, reduce, scatter
from mpitrain.tools.plan.transformer import Transformer


class BlockTimes(NamedTuple):
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
    is_cut: bool,
) -> BlockTimes:
    """The seconds of one block; the arguments are those fields of a `RankLayout` on which they depend."""
    kernels = kernels_of(machine, is_cut=is_cut)
    tokens = micro * model.context / context  # of this rank
    width, heads, head = model.width, model.heads / tensor, model.head_width
    kv_heads = max(model.kv_heads / tensor, 1)
    inner, tokens_of_experts = model.inner / tensor, tokens * model.experts_per_token
    qkv = kernels.product(tokens, width, (heads + 2 * kv_heads) * head)
    after = kernels.product(tokens, heads * head, width)
    up = kernels.product(tokens_of_experts, width, (2 if model.gated else 1) * inner)
    down = kernels.product(tokens_of_experts, inner, width)
    forward_products, backward_products = map(sum, zip(qkv, after, up, down, strict=True))
    part = BlockPart(tokens, tensor if sequence else 1, heads, inner)
    attention, streams = kernels.attention(model, software, part), kernels.elementwise(model, software, part)
    nbytes = tokens * width * machine.element_bytes
    in_tensor = _in_tensor(machine, software, nbytes, tensor, sequence).times(2)
    around = _context(model, machine, context, tensor, tokens, kv_heads, hidden_by=attention[0])
    to_experts = Sent()
    if model.experts > 1:
        to_experts = exchange(machine, nbytes * model.experts_per_token, group(machine, experts, tensor)).times(2)
    forward = forward_products + attention[0] + streams[0]
    sent = in_tensor.seconds + around.seconds + to_experts.seconds
    # A layer that is cut keeps its input when its product has ended.
    skips_last = not software.recomputes_last and not is_cut
    around_attention = 0.0
    if software.recomputes_projections:
        around_attention = qkv[0] + after[0] * (not skips_last) + in_tensor.seconds / 2
    again = {
        "none": 0.0,
        "attention": attention[0] + around_attention,
        "block": forward - down[0] * skips_last + sent,
    }[recompute]
    backward = backward_products + attention[1] + streams[1]
    return BlockTimes(forward, backward, backward_products / 2, again, in_tensor, around, to_experts)


def _in_tensor(machine: Machine, software: Software, nbytes: float, tensor: int, sequence: bool) -> Sent:
    """The exchanges around two matrices of one pass: an all-gather and a reduce-scatter, or an all-reduce."""
    ranks, joins, of_tokens = group(machine, tensor, 1), software.joins_adapters, machine.shares_memory
    if not sequence:
        return reduce(machine, nbytes, ranks, joins_adapters=joins, of_tokens=of_tokens)
    whole = gather(machine, nbytes, ranks, joins_adapters=joins, of_tokens=of_tokens)
    return whole.plus(scatter(machine, nbytes, ranks, joins_adapters=joins, of_tokens=of_tokens))


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


def block_of(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> BlockTimes:
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
        layout.is_cut,
    )


@lru_cache(maxsize=4096)
def head_s(
    model: Transformer, machine: Machine, tensor: int, context: int, micro: int, is_cut: bool
) -> tuple[float, float]:
    """Seconds of the head and the loss, forward and backward."""
    kernels, tokens = kernels_of(machine, is_cut=is_cut), micro * model.context / context
    product, ends = kernels.product(tokens, model.width, model.vocab / tensor), kernels.ends(model, tokens, tensor)
    return product[0] + ends[0], product[1] + ends[1]
