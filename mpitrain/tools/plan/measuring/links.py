"""What ranks send to each other, within nodes and between them, while all other ranks do so as well."""

from collections.abc import Callable, Mapping
from math import log2
from statistics import fmean, harmonic_mean
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from collectives import Communicator
from collectives.bench.kit.turns import Contestant, slowest
from collectives.bench.results import bus_factor
from mpitrain.job.record.machine.constants import Sizes
from mpitrain.tensor.exchange import Exchange, Room
from mpitrain.tools.plan.measuring.constants import MeasuredConstant
from mpitrain.tools.plan.measuring.rig import Calls, Rig, take_turns_within
from mpitrain.torch_glue.products import product, product_into

CALLS = {1 << 10: 20, 1 << 16: 10, 1 << 20: 4, 1 << 24: 1}
"""The sizes of the whole array, fp32, in bytes, and the calls that are timed together. The largest exceeds most caches."""
SMALL, LARGE = min(CALLS), max(CALLS)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_OVERLAPPED = 1 << 22  # fp32 numbers of the reduction beside a product
MESSAGES = {"message": 2}
"""Messages of a call: there and back."""
PRODUCTS = {"gather_tokens": "product after", "scatter_tokens": "product before", "sum_tokens": "product before"}
"""The product in each exchange of tensor parallelism, whose time is subtracted."""
COLUMNS, INNER = 256, 64
"""Of the matrices of these products: so few that a product takes about as long as the exchange."""
Level = Literal["node", "network"]
Operations = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


class GroupLinks(NamedTuple):
    """`size`: ranks of a group. `links`: seconds by operation and size."""

    size: int
    links: dict[str, Sizes]


def links(rig: Rig, until: float, memory_bandwidth: float) -> dict[str, dict[str, MeasuredConstant]]:
    """The constants of communication, by section of the machine file. Collective; until `perf_counter` is `until`.

    `memory_bandwidth`: stands for links that these ranks do not have. All nodes have the same number of ranks.
    """
    comm = rig.comm
    levels: dict[Level, Communicator] = {}
    if comm.node.size > 1:
        levels["node"] = comm.node
    if comm.num_nodes > 1:
        levels["network"] = comm.split(comm.node.rank, comm.rank)
    found = {level: GroupLinks(level_comm.size, {}) for level, level_comm in levels.items()}
    if levels:
        for (level, name), sizes in _measured(rig, levels, until - 0.2 * (until - perf_counter())).items():
            found[level].links[name] = sizes
    hidden = _hidden(rig, until)
    if "network" in levels:
        levels["network"].free()
    sections = constants(found, memory_bandwidth)
    what = "The part of a reduce-scatter or of a product, whichever is shorter, that is hidden if both run at once; at least 0.01."
    sections["efficiency"]["overlap"] = MeasuredConstant(hidden, what)
    return sections


def constants(found: Mapping[Level, GroupLinks], memory_bandwidth: float) -> dict[str, dict[str, MeasuredConstant]]:
    """The constants from the links that there are. Those of a missing level are the other's, or the memory's."""
    top: dict[str, MeasuredConstant] = {}
    shares: dict[str, MeasuredConstant] = {}
    each: dict[str, MeasuredConstant] = {}
    stand_in = "Not measured, because one rank has no link: a copy in memory, in and out."
    best, share, latency = memory_bandwidth / 2, 1.0, 1e-6
    if set(found) == {"network"}:
        best, share, latency = _summary(found["network"])
        stand_in = "Not measured, because each node has one rank: the value between nodes."
    for level, prefix, efficiency in (("node", "node_", "node_link"), ("network", "", "link")):
        where = {"node": "within a node", "network": "between nodes, of one rank of each node"}[level]
        if of_level := found.get(level):  # type: ignore[call-overload]
            best, share, latency = _summary(of_level)
            stand_in = "Not measured, because all ranks are on one node: the value within it."
        is_there = of_level is not None
        for key, value, how in (
            (f"{prefix}bandwidth", best, f"The fastest collective of {LARGE >> 20} MiB {where}."),
            (f"{prefix}latency_s", latency, f"Collectives of {SMALL} bytes {where}, by the logarithm of the ranks."),
        ):
            top[key] = MeasuredConstant(value, how if is_there else stand_in)
        how = f"All-reduce, all-gather and reduce-scatter {where}, harmonic mean."
        shares[efficiency] = MeasuredConstant(share, how if is_there else stand_in)
        for name, sizes in of_level.links.items() if of_level else ():
            each[prefix + name] = MeasuredConstant(sizes, f"(bytes, seconds) {where}.")
    if "network" in found:
        each["num_nodes"] = MeasuredConstant(found["network"].size, "Of the groups between nodes.")
    return {"": top, "efficiency": shares, "links": each}


def _summary(found: GroupLinks) -> tuple[float, float, float]:
    """The bandwidth of the fastest collective, the share of it that they reach on average, and the latency of one round."""
    rates, latencies = [], []
    for name in COLLECTIVES:
        (small, small_s), *_, (large, large_s) = found.links[name]
        # Noise must not make the small one the larger part.
        rates.append(bus_factor(name, found.size) * (large - small) / max(large_s - small_s, large_s / 2))
        latencies.append(small_s)
    return max(rates), harmonic_mean(rates) / max(rates), fmean(latencies) / log2(found.size)


def _measured(rig: Rig, levels: Mapping[Level, Communicator], until: float) -> dict[tuple[Level, str], Sizes]:
    """Seconds by level and operation: the median of the slowest rank's."""
    contestants: dict[tuple[Level, str, int], Contestant] = {}
    shared = Exchange(levels["node"]) if "node" in levels and rig.device.type == "cpu" else None
    for level, comm in levels.items():
        for nbytes, calls in CALLS.items():
            count = max(nbytes // 4 // comm.size, 1) * comm.size
            operations = _calls(rig, comm, count)
            if shared is not None and level == "node":
                operations |= _exchanges(shared, count)
            for name, (prepare, call) in operations.items():
                contestants[level, name, nbytes] = Calls(rig, call, calls, prepare)
    series = slowest(rig.comm, take_turns_within(rig.comm, contestants, until))
    taken = {key: float(np.median(values)) for (key, _), values in series.items()}

    def alone(level: Level, name: str, nbytes: int) -> float:
        seconds = taken[level, name, nbytes] / MESSAGES.get(name, 1)
        if name not in PRODUCTS:
            return seconds
        # Noise must not make the product the longer one.
        return max(seconds - taken[level, PRODUCTS[name], nbytes], seconds / 10)

    return {
        (level, name): tuple((nbytes, alone(level, name, nbytes)) for nbytes in CALLS)
        for level in levels
        for name in dict.fromkeys(name for of_level, name, _ in contestants if of_level == level)
        if name not in PRODUCTS.values()
    }


def _calls(rig: Rig, comm: Communicator, count: int) -> Operations:
    """For each operation: what writes the array that is sent, as the computation before it does, and the operation."""
    whole, part = _array(rig, comm, count), torch.zeros(count // comm.size, device=rig.device)
    gathered = torch.zeros(count, device=rig.device)
    message, partner = torch.zeros(count, device=rig.device), comm.rank ^ 1

    def there_and_back() -> None:
        if partner >= comm.size:
            return  # the last of an odd number
        for is_turn in (comm.rank % 2 == 0, comm.rank % 2 == 1):
            if is_turn:
                comm.send(message, partner)
            else:
                comm.recv(message, partner)

    return {
        "all_reduce": (whole.zero_, lambda: comm.all_reduce(whole)),
        "all_gather": (part.zero_, lambda: comm.all_gather(gathered, part)),
        "reduce_scatter": (whole.zero_, lambda: comm.reduce_scatter(part, whole)),
        "message": (message.zero_, there_and_back),
    }


def _exchanges(exchange: Exchange, count: int) -> Operations:
    """Those of tensor parallelism in node memory: each with the product before it or after it, and these products alone.

    A product that reads what other ranks have written takes longer, and a rank waits at an exchange for ranks with slower products.
    """
    size = exchange.comm.size
    tokens = max(count // COLUMNS // size, 1) * size
    a, b, c = torch.ones(tokens, INNER), torch.ones(INNER, COLUMNS), torch.ones(COLUMNS, INNER)
    own, whole = torch.zeros(tokens // size, COLUMNS), torch.zeros(tokens, COLUMNS)

    def room() -> Room:
        taken = exchange.room((tokens, COLUMNS), a)
        product_into(taken.own, a, b)
        return taken

    return {
        "product before": (a.zero_, lambda: product(a, b)),
        "product after": (whole.zero_, lambda: product(whole, c)),
        "gather_tokens": (own.zero_, lambda: product(exchange.gather(own, -2, tokens), c)),
        "scatter_tokens": (a.zero_, lambda: exchange.own_sum(room(), -2)),
        "sum_tokens": (a.zero_, lambda: exchange.whole_sum(room())),
    }


def _array(rig: Rig, comm: Communicator, count: int) -> torch.Tensor:
    """In node memory on CPUs, as the gradients of a unit are."""
    if rig.device.type == "cpu":
        array: torch.Tensor = comm.empty(count, torch.float32)
        return array
    return torch.zeros(count, device=rig.device)


def _hidden(rig: Rig, until: float) -> float:
    """The part of the shorter one of a reduce-scatter and a product that is hidden if both run at the same time."""
    comm = rig.comm
    count = _OVERLAPPED // comm.size * comm.size
    whole, part = _array(rig, comm, count), torch.zeros(count // comm.size, device=rig.device)
    a = torch.ones(1024, 1024, device=rig.device, dtype=rig.dtype)

    def both() -> None:
        work = comm.reduce_scatter(part, whole, async_op=True)
        a @ a
        work.wait()

    contestants = {
        "product": Calls(rig, lambda: a @ a, 1, whole.zero_),
        "reduction": Calls(rig, lambda: comm.reduce_scatter(part, whole), 1, whole.zero_),
        "both": Calls(rig, both, 1, whole.zero_),
    }
    series = slowest(comm, take_turns_within(comm, contestants, until))
    product, reduction, together = (float(np.median(series[name, "call"])) for name in contestants)
    return min(max((product + reduction - together) / min(product, reduction), 0.01), 1.0)
