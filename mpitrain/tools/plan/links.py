"""Seconds and bytes of collectives and messages, by the link that they cross."""

import math
from functools import lru_cache
from typing import NamedTuple

from mpitrain.job.record.machine.machine import Machine


class Sent(NamedTuple):
    """What one rank sends in a step or in a part of it."""

    seconds: float = 0.0
    node_bytes: float = 0.0
    """To ranks of its node."""
    network_bytes: float = 0.0
    """To other nodes."""

    def times(self, count: float) -> "Sent":
        return Sent(count * self.seconds, count * self.node_bytes, count * self.network_bytes)

    def plus(self, other: "Sent") -> "Sent":
        return Sent(
            self.seconds + other.seconds, self.node_bytes + other.node_bytes, self.network_bytes + other.network_bytes
        )


class Group(NamedTuple):
    """Ranks that communicate with each other. Each node has the same number of them."""

    size: int
    on_node: int
    """Ranks of the group on one node."""

    @property
    def num_nodes(self) -> int:
        return self.size // self.on_node


@lru_cache(maxsize=4096)
def group(machine: Machine, size: int, stride: int) -> Group:
    """The group of `size` ranks whose numbers are `stride` apart."""
    fitting = max(1, machine.ranks_per_node // stride)
    return Group(size, math.gcd(size, fitting) if size > fitting else size)


def gather(
    machine: Machine,
    nbytes: float,
    group: Group,
    *,
    joins_adapters: bool = True,
    is_shared: bool = False,
    of_tokens: bool = False,
    parts: int = 1,
) -> Sent:
    """An all-gather of `nbytes` altogether.

    Within a node each rank sends (n - 1) / n of the bytes. Between nodes the ranks of a node share the work, each with its own network
    adapter; without `joins_adapters` all bytes go through one adapter. `is_shared`: ranks of a node see each other's bytes anyway.
    `of_tokens`: an exchange of tensor parallelism between ranks that share memory, if they are on one node. `parts`: the number of
    gathers by which this is done.
    """
    if group.num_nodes == 1 and is_shared:
        return Sent()
    measured = _measured(machine, nbytes, group, "all_gather", parts, of_tokens=of_tokens, is_shared=is_shared)
    return _sent(machine, nbytes, group, joins_adapters, is_shared, measured)


def scatter(
    machine: Machine,
    nbytes: float,
    group: Group,
    *,
    joins_adapters: bool = True,
    of_tokens: bool = False,
    parts: int = 1,
) -> Sent:
    """A reduce-scatter, which sends as much as an all-gather."""
    measured = _measured(machine, nbytes, group, "reduce_scatter", parts, of_tokens=of_tokens)
    return _sent(machine, nbytes, group, joins_adapters, False, measured)


def reduce(
    machine: Machine,
    nbytes: float,
    group: Group,
    *,
    joins_adapters: bool = True,
    of_tokens: bool = False,
    parts: int = 1,
) -> Sent:
    """An all-reduce of `nbytes`: a reduce-scatter and an all-gather."""
    measured = _measured(machine, nbytes, group, "all_reduce", parts, of_tokens=of_tokens)
    return _sent(machine, nbytes, group, joins_adapters, False, None if measured is None else measured / 2).times(2)


def _sent(
    machine: Machine, nbytes: float, group: Group, joins_adapters: bool, is_shared: bool, measured: float | None
) -> Sent:
    """What an all-gather sends. `measured`: its seconds, instead of those of the limits."""
    if group.size == 1:
        return Sent()
    node_rate = machine.node_bandwidth * machine.efficiency.node_link
    nodes, beside = group.num_nodes, group.on_node
    if nodes == 1:
        sent = (beside - 1) / beside * nbytes
        seconds = sent / node_rate + math.log2(beside) * machine.node_latency_s
        return Sent(seconds if measured is None else measured, sent, 0.0)
    latency = math.log2(nodes) * machine.latency_s
    rate = machine.bandwidth * machine.efficiency.link
    if not joins_adapters:
        sent = (group.size - 1) / group.size * nbytes
        return Sent(sent / rate + latency, 0.0, sent)
    over = (nodes - 1) / nodes * nbytes / beside
    inside = 0.0 if is_shared else (beside - 1) / beside * nbytes
    # The two levels work on different parts of the bytes at the same time: the slower one counts. One ring over all ranks would send
    # (size - 1) / size of the bytes through the adapters of a node instead, which is more by less than 1 / (nodes - 1).
    seconds = max(over / rate, inside / node_rate) + latency
    return Sent(seconds if measured is None else measured, inside, over)


_OF_TOKENS = {
    "all_gather": "node_gather_tokens",
    "reduce_scatter": "node_scatter_tokens",
    "all_reduce": "node_sum_tokens",
}
"""The exchange of tensor parallelism that does the same as a collective between ranks that share memory."""


def _measured(
    machine: Machine, nbytes: float, group: Group, name: str, parts: int, *, of_tokens: bool, is_shared: bool = False
) -> float | None:
    """Measured seconds of a collective: within the node, then between nodes, where each rank has its share of the bytes.

    None if they were not measured. Groups of another size than the measured ones send another share of the bytes. In an exchange of
    tokens each rank writes and reads as much in any group.
    """
    is_exchange = of_tokens and group.num_nodes == 1
    within = "" if is_shared else _OF_TOKENS[name] if is_exchange else f"node_{name}"
    links, total = machine.links, 0.0
    if links is None:
        return None
    for link, of, count, size in (
        (within, nbytes, group.on_node, machine.ranks_per_node),
        (name, nbytes / group.on_node, group.num_nodes, links.num_nodes),
    ):
        if count == 1 or not link:
            continue
        seconds = links.seconds(link, of / parts)
        if seconds is None:
            return None
        total += parts * seconds * (1.0 if is_exchange else ((count - 1) / count) / ((size - 1) / size))
    return total


def message(machine: Machine, nbytes: float, *, within_node: bool) -> Sent:
    """`nbytes` to one other rank."""
    measured = machine.links and machine.links.seconds("node_message" if within_node else "message", nbytes)
    if within_node:
        seconds = nbytes / (machine.node_bandwidth * machine.efficiency.node_link) + machine.node_latency_s
        return Sent(measured or seconds, nbytes, 0.0)
    return Sent(measured or nbytes / (machine.bandwidth * machine.efficiency.link) + machine.latency_s, 0.0, nbytes)


def exchange(machine: Machine, nbytes: float, group: Group) -> Sent:
    """An all-to-all: each rank sends 1 / n of its `nbytes` to each rank."""
    if group.size == 1:
        return Sent()
    inside = (group.on_node - 1) / group.size * nbytes
    over = (group.size - group.on_node) / group.size * nbytes
    parts = message(machine, inside, within_node=True), message(machine, over, within_node=False)
    return Sent(max(part.seconds for part in parts), inside, over) if over else parts[0]
