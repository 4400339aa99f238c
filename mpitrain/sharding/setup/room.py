"""Whether the nodes have room for resident storage: decided before a shard is made, and alike on all ranks that have the same units.

What is counted: the full parameters of the new units, the gradient buffers of these units and of those within the module so far, and
the rings of the collectives, each only where several ranks of a node share it. python -m mpitrain memory counts them by the same
functions; it also counts what is not known here: the text, the activations of tensor-parallel ranks, copies of the state. Gradient
buffers, rings and these activations find other memory if another job takes the room later.

The room is that of the folder of node memory. Where private storage would need less memory (stage 3), that within the limits of the
cgroups counts, too.
"""

import logging
import platform
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from collectives import Communicator
from collectives.cgroup import MORE_MEMORY
from collectives.environment import memory_folder
from collectives.texts import show_bytes
from collectives.transports.node.memory import remedy, say_short
from collectives.transports.node.noted_room import Room, noted_room, room_now, take_noted
from collectives.transports.node.staged import ring_bytes
from mpitrain.placement.parts import stages_of
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.unit.host_arrays import gradient_buffers
from mpitrain.sharding.unit.policy import MixedPrecisionPolicy
from mpitrain.sharding.unit.unit import Unit

_log = logging.getLogger("mpitrain")


class NewUnit(NamedTuple):
    """A unit that `fully_shard` will make: its parameters on the CPU, and its dtypes."""

    params: Sequence[nn.Parameter]
    policy: MixedPrecisionPolicy


class _Need(NamedTuple):
    """A rank's share of the node memory, in bytes. `full`: for the new full parameters. `others`: for all else."""

    full: int
    others: int


def lacks_room(
    new: Sequence[NewUnit],
    made: Iterable[Unit],
    ranks: DataParallelRanks,
    *,
    would_keep: bool,
    has_slices: bool = False,
) -> bool:
    """Whether a node has too little node memory for the units of `new`, if they are resident. Collective over `ranks.all_holders`.

    `made`: the units within the module, whose gradient buffers are made at the first forward. `would_keep`: private storage would keep
    a copy of the full parameters for each rank. That is more memory, so only the folder can be too small then. The same on all ranks;
    one says it.
    """
    stages = stages_of(param for unit in new for param in unit.params)
    everyone, holders = ranks.everyone.node.size, ranks.all_holders.node
    noted = noted_room(stages)
    mine = _need(new, made, ranks, has_slices=has_slices), room_now() if noted is None else noted
    of_ranks = holders.all_gather_object(mine)
    # Other stages of a pipeline are taken to need as much: see [Note: room of stages] in noted_room.py.
    full, others = (sum(each) * everyone // holders.size for each in zip(*(need for need, _ in of_ranks), strict=True))
    free = Room(*(min(each) for each in zip(*(free for _, free in of_ranks), strict=True)))
    # Without `full` no rank shares parameters.
    problem = _problem(full + others, free, counts_limit=not would_keep) if full else ""
    problems = [each for each in ranks.all_holders.all_gather_object(problem) if each]
    if problems:
        say_private(ranks.all_holders, problems[0])
    else:
        take_noted(stages, full)
    return bool(problems)


def say_private(comm: Communicator, why: str) -> None:
    """Say on one rank of `comm` that parameters for which storage is "auto" are private."""
    say_short(comm.rank, "fully_shard: full parameters are in private memory", why, _log)


def _problem(needed: int, free: Room, *, counts_limit: bool) -> str:
    """What is too small on this node; "" if nothing is."""
    wanted = f"{show_bytes(needed)} are expected, gradient buffers included"
    if needed > free.in_folder:
        return f"{memory_folder()} on {platform.node()} has {show_bytes(free.in_folder)} of room, and {wanted}; {remedy(needed)}"
    if counts_limit and needed > free.in_limit:
        left = show_bytes(max(free.in_limit, 0))
        return f"the limit of memory of the cgroup on {platform.node()} leaves {left}, and {wanted}; {MORE_MEMORY}"
    return ""


def _need(new: Iterable[NewUnit], made: Iterable[Unit], ranks: DataParallelRanks, *, has_slices: bool) -> _Need:
    full = 0
    gradients: dict[torch.dtype, list[int]] = {}
    for unit in made:
        for each in (each for flat in unit.flats for each in flat.gradients):
            if each.on_host:
                gradients.setdefault(each.reduce_dtype, []).append(each.layout.numel)
    for params, policy in new:
        numels: dict[torch.dtype, int] = {}
        for param in params:
            param_dtype, reduce_dtype = policy.dtypes_of(param.dtype)
            full += param.numel() * param_dtype.itemsize
            if param.requires_grad:
                numels[reduce_dtype] = numels.get(reduce_dtype, 0) + param.numel()
        for dtype, numel in numels.items():
            gradients.setdefault(dtype, []).append(numel)
    others = ring_bytes(ranks.everyone.node.size)
    if _readers(ranks, has_slices=has_slices).node.size > 1:
        for dtype, of_each in gradients.items():
            count, longest = gradient_buffers(of_each)
            others += count * longest * dtype.itemsize
    num_beside = ranks.wired.weights.node.size
    return _Need(full // num_beside if num_beside > 1 else 0, others)


def _readers(ranks: DataParallelRanks, *, has_slices: bool) -> Communicator:
    """The ranks that read a gradient buffer of each other, as in step/reducer.py."""
    if has_slices:
        return ranks.data_parallel
    return ranks.shard if ranks.shard.size > 1 else ranks.replicate
