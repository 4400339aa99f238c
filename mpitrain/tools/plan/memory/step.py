"""The peak memory of a training step, counted with tensors that have no memory.

Fake tensors go through the same operations of forward and backward as real tensors on the CPU, and are freed at the same points. So the
count is exact, except for the temporary memory of kernels and the free memory that the allocator keeps.
"""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from collectives.environment import switch
from mpitrain.job.config import Config
from mpitrain.job.data.loading import has_documents
from mpitrain.models import LanguageModel, Segments, TransformerConfig, build
from mpitrain.sharding import checkpoint_activations
from mpitrain.sharding.slices import Slices
from mpitrain.tools.plan.memory.stage_ranks import StageRank, run, take_stages
from mpitrain.tools.plan.memory.tensor_ranks import SharedActivations, TensorRank, cut
from mpitrain.tools.plan.memory.tracker import Tracker, total


def units_of(model: LanguageModel) -> list[list[nn.Parameter]]:
    """The parameters of each unit that `make_model` makes: the blocks, then the rest."""
    units = [list(block.parameters()) for block in model.blocks]
    inside = {id(param) for unit in units for param in unit}
    return [*units, [param for param in model.parameters() if id(param) not in inside]]


def takes_grads_over(config: Config, num_data: int) -> bool:
    """Whether the full gradients become the gradients of the shards without a copy: only with one data rank, in fp32, without
    slices."""
    is_fp32 = config.parallel.param_dtype == config.parallel.reduce_dtype == "float32"
    return num_data == 1 and is_fp32 and not config.train.slices


class StepRank(NamedTuple):
    """The rank whose step is measured."""

    num_data: int
    """The number of ranks that share a global batch."""
    tensor: TensorRank
    held: tuple[int, ...]
    """The bytes of the shards' gradients, in the order of `units_of`."""
    is_gathered: bool
    """Whether full parameters are gathered for use."""
    stage: StageRank | None = None
    """Its place in a pipeline."""


def measure(config: Config, rank: StepRank) -> Counter[str]:
    """The peak of a step, or of an evaluation if it needs more: "activations", "gradients", "full parameters" if they are gathered,
    "heap". And the arrays of both for "shared activations", which stay."""
    shared = SharedActivations(rank.tensor)
    micro_batch = config.train.rows(rank.num_data)
    peak = _run(config, rank, shared, micro_batch, train=True)
    if config.train.eval_batches:
        rows = micro_batch if config.train.slices else config.train.batch // rank.num_data
        evaluated = _run(config, rank, shared, rows, train=False)
        peak = max(peak, evaluated, key=total)
    peak["shared activations"] = shared.nbytes
    return peak


def _run(config: Config, rank: StepRank, shared: SharedActivations, rows: int, *, train: bool) -> Counter[str]:
    sizes, num_micro = config.model.resolve(), config.train.micro_batches(rank.num_data) if train else 1
    with FakeTensorMode():
        model = _fake_model(sizes, getattr(torch, config.parallel.param_dtype))
        tracker = Tracker()
        ranks = cut(model, rank.tensor, sequence=config.parallel.sequence)
        if ranks is not None:
            shared.take_part(ranks, tracker)
        stages = None if rank.stage is None else take_stages(model, rank.stage)
        for param in model.parameters():
            tracker.ignore(param)
        if (what := config.parallel.checkpoint_activations) != "none":
            checkpoint_activations(model, model.blocks, what=what, partition=config.parallel.partition_activations)
        if rank.is_gathered:
            _gather(model, tracker, again=config.parallel.reshard_after_forward)
        if train:
            _reduce(model, tracker, config, rank)
        if train and config.train.slices:
            waiting = Slices(config.train.slices, rank.num_data, 0).num_waiting
            tracker.add("gradients", sum(rank.held) * waiting)
        elif not train or (num_micro > 1 and stages is None and not takes_grads_over(config, rank.num_data)):
            tracker.add("gradients", sum(rank.held))  # until the next step begins
        with tracker, torch.set_grad_enabled(train):
            tokens = torch.empty(num_micro, rows, sizes.context + 1, dtype=torch.int64)
            segments = None
            if has_documents(config.data) and config.data.mask_documents:
                # Their number makes almost no difference, but rows that are one document each need less.
                segments = Segments.of(np.arange(sizes.context)[None].repeat(rows, 0) < sizes.context // 2)
            if stages is not None and rank.stage is not None:
                own = rank.tensor.size if train and config.parallel.sequence else 1
                stream = (rows, sizes.context // own, sizes.width)
                run(stages, rank.stage, tokens[0], segments, stream, getattr(torch, config.parallel.param_dtype))
                if train and not config.train.slices:  # those of the shards take the place of the full ones
                    tracker.add("gradients", max(0, sum(rank.held) - tracker.now["gradients"]))
                return tracker.peak
            loss = model(tokens[0, :, :-1], tokens[0, :, 1:], reduction="sum", segments=segments)
            if train:
                loss.backward()
    return tracker.peak


def _fake_model(sizes: TransformerConfig, dtype: torch.dtype) -> LanguageModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the parameters of a fake model cannot be cast later
    try:
        return build(sizes)
    finally:
        torch.set_default_dtype(before)


def _gather(model: LanguageModel, tracker: Tracker, *, again: bool) -> None:
    """Count full parameters as `Gathered` in storage.py holds them. `again`: a block frees them after its forward, and its backward
    fills them again. With a progress thread the next block is prefetched: see `prefetch_bytes` of fully_shard.
    """
    *blocks, root = [sum(param.nbytes for param in unit) for unit in units_of(model)]
    tracker.add("full parameters", root)
    ahead = switch("MPITRAIN_PROGRESS_THREAD") is True
    full: set[int] = set()

    def fill(*_: Any, index: int, then: int) -> None:
        for each in (index, then) if ahead and 0 <= then < len(blocks) else (index,):
            if each not in full:
                full.add(each)
                tracker.add("full parameters", blocks[each])

    def free(*_: Any, index: int) -> None:
        full.remove(index)
        tracker.add("full parameters", -blocks[index])

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(partial(fill, index=index, then=index + 1))
        if again:
            block.register_forward_hook(partial(free, index=index))
            block.register_full_backward_pre_hook(partial(fill, index=index, then=index - 1))
        block.register_full_backward_hook(partial(free, index=index))


def _reduce(model: LanguageModel, tracker: Tracker, config: Config, rank: StepRank) -> None:
    """Free full gradients when they are reduced, and count the gradients of the shards from then on: see [Note: order] and
    [Note: gradient buffers] in sharding/step/reducer.py."""
    is_first = config.train.micro_batches(rank.num_data) == 1  # later micro-batches add to the gradients of the first
    reduced = [*reversed(rank.held[:-1]), rank.held[-1]]
    *blocks, root = units_of(model)
    order = [*reversed(blocks), root]
    missing = [len(unit) for unit in order]
    adopted = takes_grads_over(config, rank.num_data)
    dtype, reduce_dtype = (getattr(torch, name) for name in (config.parallel.param_dtype, config.parallel.reduce_dtype))
    wide = torch.promote_types(dtype, reduce_dtype)  # of sums of micro-batches: see unit/grad_sums.py
    waiting: set[torch.Tensor] = set()
    at = 0  # in the order: the unit to reduce next

    def on_grad(param: torch.Tensor, index: int) -> None:
        nonlocal at
        if param.grad is None:  # the backward of a stage leaves it for later
            return
        tracker.is_of(param.grad, "gradients")
        missing[index] -= 1
        if rank.stage is not None and not config.train.slices:
            # A pipeline keeps full gradients until the end of the step.
            if wide != dtype and param not in waiting:
                waiting.add(param)
                tracker.add("gradients", param.numel() * wide.itemsize)
            if wide != dtype:
                param.grad = None
            return
        if adopted:
            return
        if index == at and (rank.num_data > 1 or config.train.slices):
            param.grad = None  # moved to a gradient buffer
        while at < len(order) and missing[at] <= 0 and config.parallel.stage != 1:
            if is_first:
                tracker.add("gradients", reduced[at])
            for done in order[at]:
                done.grad = None
            at += 1
        if at == len(order):  # the next backward of a stage
            at, missing[:] = 0, map(len, order)

    for index, unit in enumerate(order):
        for param in unit:
            param.register_post_accumulate_grad_hook(lambda p, i=index: on_grad(p, i))
