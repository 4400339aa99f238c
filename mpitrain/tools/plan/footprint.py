"""Bytes of a rank by kind, from formulae: for GPUs, and for clusters that are not at hand.

For a run of this library on CPUs, `python -m mpitrain memory` counts the bytes of the model's own operations.
"""

from functools import lru_cache

from mpitrain.job.record.machine.machine import Machine
from mpitrain.tools.plan.layout import HeldParameters, RankLayout, Software, candidates, rank_blocks, scheduled
from mpitrain.tools.plan.transformer import Transformer

KINDS = {
    "parameters": "those of forward and backward",
    "gradients": "of the shards, in fp32, and full ones that wait for their reduction",
    "optimizer": "AdamW's two moments, and the parameters in fp32",
    "units": "parameters and gradients of two blocks, gathered or on their way",
    "activations": "kept for the backward, of all micro-batches in flight",
    "temporary": "activations of one block that are computed again, or the logits",
}
"""The kinds of memory."""


def footprint(model: Transformer, machine: Machine, software: Software, layout: RankLayout) -> dict[str, float]:
    """The bytes of the rank of a pipeline that needs most, by kind. ValueError for a schedule that is not defined for these numbers."""
    kept, again, logits = activations(model, machine, software, layout)
    chunks, blocks = layout.stages_per_rank, rank_blocks(model, software, layout)
    of_ranks = candidates(model, software, layout)
    if layout.pipeline == 1:
        states = _states(machine, software, layout, of_ranks[0], blocks[0])
        held = {"activations": kept * model.layers, "temporary": max(again, logits)}
        if layout.num_micro == 1:  # gradients come while activations go
            states["gradients"] = max(0.0, states["gradients"] - held["activations"])
        return states | held
    schedule = scheduled(layout.schedule, layout.pipeline, layout.num_micro, chunks)
    last = schedule.rank_of(schedule.num_stages - 1)
    made = (
        _states(machine, software, layout, params, blocks[rank])
        | {
            "activations": schedule.peak(rank) * blocks[rank] / chunks * kept,
            "temporary": max(again, logits * (rank == last)),
        }
        for rank, params in of_ranks.items()
    )
    return max(made, key=lambda one: sum(one.values()))


def _states(
    machine: Machine, software: Software, layout: RankLayout, held: HeldParameters, blocks: int
) -> dict[str, float]:
    """Of a rank with these parameters and this number of blocks."""
    params, e, own = held.all, machine.element_bytes, held.own(layout)
    is_spread = layout.zero > 0 and layout.shards > 1
    beside = min(layout.shards, max(1, machine.ranks_per_node // layout.tensor)) if layout.resident else 1
    block = params / max(1, blocks)
    is_gathered = layout.zero == 3 and not layout.resident and is_spread
    is_in_place = e == 4 and not is_gathered  # the optimizer updates the parameters of forward and backward
    parameters = 0.0 if is_gathered else params * e / beside
    gathered = 2 * block * e if is_gathered else 0.0
    is_sum = layout.pipeline > 1 or not software.reduces_each_micro_batch  # of micro-batches
    waits = is_sum or layout.zero == 1
    ranks = layout.data * layout.context
    full = (
        params * (max(e, software.grad_bytes) if is_sum else e)
        if waits and ranks > 1 and not (e == 4 and layout.zero == 0)
        else 0.0
    )
    buffers = 2 * block * software.grad_bytes if ranks > 1 and not waits else 0.0
    return {
        "parameters": parameters,
        "gradients": 4 * own + full,
        "optimizer": 8 * own + (0.0 if is_in_place else 4 * own),
        "units": gathered + buffers,
    }


def activations(
    model: Transformer, machine: Machine, software: Software, layout: RankLayout
) -> tuple[float, float, float]:
    """Bytes of one micro-batch: those that one block keeps, those of a block that is computed again, and those of the logits."""
    return _activations(
        model, machine, software, layout.tensor, layout.context, layout.micro, layout.sequence, layout.recompute
    )


@lru_cache(maxsize=4096)
def _activations(
    model: Transformer,
    machine: Machine,
    software: Software,
    tensor: int,
    context: int,
    micro: int,
    sequence: bool,
    recompute: str,
) -> tuple[float, float, float]:
    """Section 4 of Korthikanti et al. 2022 (2205.05198), for any width of heads and feed-forward layers, and element size."""
    e, tokens = machine.element_bytes, micro * model.context / context
    between = tensor if sequence else 1
    stream = tokens * model.width * e / between
    mask = tokens * model.width / between if software.dropout else 0.0
    heads = tokens * model.heads * model.head_width * e / tensor
    keys = tokens * max(model.kv_heads / tensor, 1) * model.head_width * e
    scores = 0.0
    if not software.fused_attention:  # softmax's output; with dropout its mask and its output, too
        scores = tokens * model.heads / tensor * model.context * ((2 * e + 1) if software.dropout else e)
    inner = tokens * model.experts_per_token * model.inner * e / tensor
    core = heads + 2 * keys + scores  # queries, keys, values
    norm = stream
    if model.has_rms_norms:
        core += keys  # before the rotation they are in one piece of memory with the values
        norm = stream if software.fused_norms else 2 * stream
    # Ranks of one node that share memory keep one gathered input together.
    matrix = tokens * model.width * e if software.keeps_gathered and not machine.shares_memory else stream
    attention = norm + matrix + core + heads + mask  # the last heads: input of the projection
    mlp = norm + matrix + inner * (4 if model.gated else 2) + mask
    whole = attention + mlp
    logits = tokens * model.vocab / tensor * (e + 2 * 4)  # and in fp32, and their gradient
    if recompute == "block":
        return stream, whole, logits
    if recompute == "attention":
        left = core + heads if software.recomputes_projections else scores
        return whole - left, left, logits
    return whole, 0.0, logits
