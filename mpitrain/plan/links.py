"""Seconds and bytes of collectives and messages, by the link that they cross."""

import math
from functools import lru_cache
from typing import NamedTuple

from mpitrain.plan.machine import Machine


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
    machine: Machine, nbytes: float, group: Group, *, joins_adapters: bool = True, is_shared: bool = False
) -> Sent:
    """An all-gather of `nbytes` altogether, or a reduce-scatter, which sends as much.

    Within a node each rank sends (n - 1) / n of the bytes. Between nodes the ranks of a node share the work, each with its own network
    adapter; without `joins_adapters` all bytes go through one adapter. `is_shared`: ranks of a node see each other's bytes anyway.
    """
    if group.size == 1:
        return Sent()
    node_rate = machine.node_bandwidth * machine.efficiency.node_link
    nodes, beside = group.num_nodes, group.on_node
    if nodes == 1:
        if is_shared:
            return Sent()
        sent = (beside - 1) / beside * nbytes
        return Sent(sent / node_rate + math.log2(beside) * machine.node_latency_s, sent, 0.0)
    latency = math.log2(nodes) * machine.latency_s
    rate = machine.bandwidth * machine.efficiency.link
    if not joins_adapters:
        sent = (group.size - 1) / group.size * nbytes
        return Sent(sent / rate + latency, 0.0, sent)
    over = (nodes - 1) / nodes * nbytes / beside
    inside = 0.0 if is_shared else (beside - 1) / beside * nbytes
    # The two levels run at the same time, as in NCCL's rings: the slower one counts.
    return Sent(max(over / rate, inside / node_rate) + latency, inside, over)


def reduce(
    machine: Machine, nbytes: float, group: Group, *, joins_adapters: bool = True, is_shared: bool = False
) -> Sent:
    """An all-reduce of `nbytes`: a reduce-scatter and an all-gather."""
    return gather(machine, nbytes, group, joins_adapters=joins_adapters, is_shared=is_shared).times(2)


def message(machine: Machine, nbytes: float, *, within_node: bool) -> Sent:
    """`nbytes` to one other rank."""
    if within_node:
        return Sent(
            nbytes / (machine.node_bandwidth * machine.efficiency.node_link) + machine.node_latency_s, nbytes, 0.0
        )
    return Sent(nbytes / (machine.bandwidth * machine.efficiency.link) + machine.latency_s, 0.0, nbytes)


def exchange(machine: Machine, nbytes: float, group: Group) -> Sent:
    """An all-to-all: each rank sends 1 / n of its `nbytes` to each rank."""
    if group.size == 1:
        return Sent()
    inside = (group.on_node - 1) / group.size * nbytes
    over = (group.size - group.on_node) / group.size * nbytes
    parts = message(machine, inside, within_node=True), message(machine, over, within_node=False)
    return Sent(max(part.seconds for part in parts), inside, over) if over else parts[0]
