"""Whether the nodes have room for resident storage: decided before a shard is made, and alike on all ranks that have the same units.

What is counted: the full parameters of the new units, the gradient buffers of all units of the model so far, and the rings of the
collectives. python -m mpitrain memory counts by the same functions. Other jobs may take the memory later: then `fully_shard`
(api.py), the reducer (step/reducer.py) and the collectives use other memory, each when it lacks some.
"""

import platform
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from collectives.texts import show_bytes
from collectives.transports.node.memory import folder, room, say_short
from collectives.transports.node.staged import ring_bytes
from mpitrain.sharding.setup.policy import MixedPrecisionPolicy
from mpitrain.sharding.unit.host_arrays import gradient_buffers
from mpitrain.sharding.unit.ranks import DataParallelRanks
from mpitrain.sharding.unit.unit import Unit


class NewUnit(NamedTuple):
    """A unit that `fully_shard` will make: its parameters on the CPU, and its dtypes."""

    params: Sequence[nn.Parameter]
    policy: MixedPrecisionPolicy


def lacks_room(new: Iterable[NewUnit], made: Iterable[Unit], ranks: DataParallelRanks) -> bool:
    """Whether a node has too little node memory for the units of `new`, if they are resident. Collective over `ranks.all_holders`.

    `made`: the units that exist, whose gradient buffers are made at the first forward. The same on all ranks; one rank says it.
    """
    everyone, holders = ranks.everyone.node.size, ranks.all_holders.node
    of_ranks = holders.all_gather_object((_need(new, made, ranks), room()))
    # Other stages of a pipeline shard their parts in calls of their own: they are taken to need as much.
    need = sum(need for need, _ in of_ranks) * everyone // holders.size
    free = min(free for _, free in of_ranks)
    problem = ""
    if need > free:
        problem = f"{folder()} on {platform.node()} has {show_bytes(free)} of room, and {show_bytes(need)} are expected"
    problems = [each for each in ranks.all_holders.all_gather_object(problem) if each]
    if problems:
        say_short(
            ranks.all_holders.rank,
            f"fully_shard: full parameters are in private memory, a copy for each rank: {problems[0]}, gradient buffers included; "
            "make it larger, or set MPITRAIN_SHM_DIR to a folder in memory that has more",
        )
    return bool(problems)


def _need(new: Iterable[NewUnit], made: Iterable[Unit], ranks: DataParallelRanks) -> int:
    """This rank's share of the node memory, in bytes."""
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
    need = full // ranks.wired.weights.node.size
    if ranks.data_parallel.size > 1:  # otherwise the gradients of the parameters become those of the shards
        for dtype, of_each in gradients.items():
            count, longest = gradient_buffers(of_each)
            need += count * longest * dtype.itemsize
    return need + ring_bytes(ranks.everyone.node.size)
