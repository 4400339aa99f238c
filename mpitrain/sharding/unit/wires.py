"""The formats in which gradients and weights are sent between nodes: communicators with a wire, made once for each group and format.

[Note: wires] Only sums of gradients and gathers of weights are encoded, and only between nodes; norms, flags and messages are exact.
All ranks get the same bits, because the owner of a sum, and of a row, uses the decoded values, too. A group on one node has no wire:
its communicator is the one without a wire, and nothing changes there. Encoded gathers of weights follow ZeRO++ (Wang et al. 2023,
2306.10209), where the shards stay masters in fp32.

[Note: alike] Tensor-parallel ranks hold some parameters alike: norms, biases of row layers, positions, heads of keys that several ranks
share. Each of these ranks averages its own copy over its own data-parallel group, and all must get the same bits. An error of a format
depends on the neighbours in the buffer, with which an element shares a scale, and on the ranks that are on one node, whose sum is
encoded. So these parameters have a flat buffer of their own, and groups that lie differently on the nodes encode nothing.
"""

import logging
import weakref
from functools import cache

from collectives import Communicator
from collectives.codec.formats import FORMATS
from collectives.selection.selector import EXACT
from collectives.selection.wire import AUTO
from mpitrain.placement.axes import group_of
from mpitrain.sharding.ranks import DataParallelRanks, WiredGroups

_log = logging.getLogger("mpitrain")

# Weak keys, as in axes.py: a communicator with a wire is freed with its communicator.
_made: "weakref.WeakKeyDictionary[Communicator, dict[str, Communicator]]" = weakref.WeakKeyDictionary()


def chosen_format(comm: Communicator, wire: str) -> str:
    """The format that `wire` means on all ranks of `comm`: for "auto" what a measurement chooses, which is made once. Collective."""
    if wire != AUTO:
        return wire
    return EXACT if comm.num_nodes == 1 else _made_once(comm, AUTO).wire["network"]


def _encoding(comm: Communicator, wire: str) -> Communicator:
    """A communicator of the same ranks that encodes between nodes; `comm` itself if nothing is to encode. Collective.

    `wire`: a name of `collectives.codec.FORMATS`.
    """
    return comm if comm.num_nodes == 1 or FORMATS[wire].is_exact else _made_once(comm, wire)


def _made_once(comm: Communicator, wire: str) -> Communicator:
    of_comm = _made.setdefault(comm, {})
    if wire not in of_comm:
        of_comm[wire] = comm.with_wire(wire)
    return of_comm[wire]


def wire_groups(ranks: DataParallelRanks, wire: str, wire_weights: str) -> DataParallelRanks:
    """`ranks` with communicators that encode gradients and weights between nodes. Collective."""
    if ranks.everyone.num_nodes == 1 and ranks.everyone.rank == 0 and (line := about_one_node(wire, wire_weights)):
        _warn_once(line)
    gradients, weights = (chosen_format(ranks.everyone, each) for each in (wire, wire_weights))
    if ranks.everyone.num_nodes == 1 or (FORMATS[gradients].is_exact and FORMATS[weights].is_exact):
        return ranks
    names = ("shard", "replicate", "within", "across")
    groups: dict[str, Communicator] = {name: getattr(ranks, name) for name in names}
    fit = dict(zip(names, _lie_alike(ranks, list(groups.values())), strict=True))
    made = {name: _encoding(group, gradients) if fit[name] else group for name, group in groups.items()}
    if not all(fit.values()) and ranks.everyone.rank == 0:
        _log.warning(
            "fully_shard: some gradients are sent as fp32, not as %s, because the data-parallel groups of tensor-parallel ranks lie "
            "differently on the nodes", gradients,
        )  # fmt: skip
    of_weights = _for_weights(ranks, weights, can_encode=fit["shard"])
    wired = WiredGroups(**made, weights=of_weights, encodes_weights=of_weights is not ranks.shard, is_lossy=True)
    return ranks._replace(wired=wired)


def about_one_node(wire: str, wire_weights: str) -> str:
    """A line about formats that have no effect, because all ranks are on one node; "" without one. "auto" chooses fp32 there."""
    asked = [
        f"{name} {each}" for name, each in (("wire", wire), ("wire_weights", wire_weights)) if each not in (EXACT, AUTO)
    ]
    return f"{', '.join(asked)}: these ranks are on one node, so nothing is encoded" if asked else ""


@cache
def _warn_once(line: str) -> None:
    _log.warning("fully_shard: %s", line)


def _lie_alike(ranks: DataParallelRanks, groups: list[Communicator]) -> list[bool]:
    """For each group, whether the same groups of the other tensor-parallel ranks are spread over nodes in the same way. Collective.

    Otherwise the parameters that these ranks hold alike would get different errors [Note: alike].
    """
    if ranks.tensor.size == 1:
        return [True] * len(groups)
    mine = [[list(node) for node in group.nodes] for group in groups]
    of_all = ranks.tensor.all_gather_object(mine)
    return [all(others[i] == mine[i] for others in of_all) for i in range(len(groups))]


def _for_weights(ranks: DataParallelRanks, wire: str, *, can_encode: bool) -> Communicator:
    """The shard group with a wire for weights, if all copies of the model can encode them: all are to compute with the same values."""
    if FORMATS[wire].is_exact or ranks.shard.size == 1:
        return ranks.shard
    encoding = _encoding(ranks.shard, wire)
    can_encode = can_encode and encoding is not ranks.shard and "encoded" in encoding.algorithms("all_gather")
    of_all = ranks.everyone.all_gather_object(can_encode)
    if all(of_all):
        return encoding
    if any(of_all) and ranks.everyone.rank == 0:
        _log.warning(
            "fully_shard: weights are sent as fp32, not as %s, because only %d of %d ranks have their copy of the model on several "
            "nodes with equal numbers of ranks", wire, sum(of_all), len(of_all),
        )  # fmt: skip
    return ranks.shard


def group_for_weights(ranks: DataParallelRanks, size: int) -> Communicator:
    """The group of `size` neighbouring ranks of the shard group, with the wire of weights. Collective.

    It gathers values that were decoded. If the group is on several nodes, they are encoded once more, the same on all ranks.
    """
    group = group_of(ranks.shard, size)
    if ranks.wired.weights is ranks.shard or not all(_lie_alike(ranks, [group])):
        return group
    return _encoding(group, ranks.wired.weights.wire["network"])
