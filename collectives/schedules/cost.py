"""The time of a schedule on a network of thousands of ranks, by the alpha-beta model, computed message by message.

A message of m bytes takes alpha + m / bandwidth, with different numbers within a node and between nodes. It begins when both its ranks
have ended their previous steps; a rank sends and receives at the same time at full speed (Hockney, Parallel Computing 1994; Thakur,
Rabenseifner and Gropp, IJHPCA 2005). If more messages leave or reach a node in one round than it has links, they share the links
evenly. The model does not include the time of additions, or congestion between nodes.

Each further segment of a full pipeline takes the same time, so the times of two short pipelines give the time of a long one. A
schedule that is the same on each node is computed on one node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collectives.schedules import BUILDERS, PIPELINED, TWO_LEVEL, build
from collectives.schedules.schedule import Schedule
from collectives.schedules.trace import Trace, trace

SEGMENTS = tuple(1 << i for i in range(13))  # the numbers of segments to try
_SHORT, _LONG = 4, 8  # segments of the two pipelines that are computed message by message


@dataclass(frozen=True)
class Network:
    """The network between the ranks. Times in seconds, bandwidths in bytes per second and direction.

    `links_per_node`: the number of messages that can leave, and enter, a node at full bandwidth at the same time; None: one for each
    of its ranks, as if each GPU has its own adapter.
    """

    per_node: int = 1
    alpha: float = 5e-6
    bandwidth: float = 25e9
    node_alpha: float = 2e-6
    node_bandwidth: float = 200e9
    links_per_node: int | None = None


@dataclass(frozen=True)
class Price:
    """The time of an algorithm for `nbytes`, the whole buffer. `num_segments`: the best number; 1 if it is not a pipeline."""

    algorithm: str
    nbytes: int
    num_segments: int
    seconds: float


def prices(operation: str, size: int, network: Network, sizes: Sequence[int]) -> list[Price]:
    """The price of each algorithm of `operation` on `size` ranks at each of `sizes` (bytes of the whole buffer), with rank 0 as root.

    Two-level algorithms only for several nodes of several ranks. ValueError if `network.per_node` does not divide `size`.
    """
    if size < 1 or network.per_node < 1 or size % network.per_node:
        raise ValueError(
            f"{size} ranks with {network.per_node} on each node; expected a multiple of {network.per_node} ranks"
        )
    nbytes = np.array(sizes, float)
    found = []
    for algorithm in BUILDERS[operation]:
        if algorithm in TWO_LEVEL and not 1 < network.per_node < size:
            continue
        if algorithm in PIPELINED:
            tried = _pipeline_seconds(operation, algorithm, size, network, nbytes)
        else:
            schedule = build(operation, algorithm, size, per_node=network.per_node)
            tried = seconds(_walked(schedule, network), network, nbytes)[None]
        best = tried.argmin(0)
        found += [
            Price(algorithm, n, SEGMENTS[k] if algorithm in PIPELINED else 1, float(tried[k, i]))
            for i, (n, k) in enumerate(zip(sizes, best.tolist(), strict=True))
        ]
    return found


def seconds(run: Trace, network: Network, nbytes: np.ndarray) -> np.ndarray:
    """The time until the last rank has ended, for each size of the whole buffer in bytes (1-D)."""
    across = run.source // network.per_node != run.destination // network.per_node
    shared = np.where(across, _sharing(run, network, across), 1)
    alpha = np.where(across, network.alpha, network.node_alpha)[:, None]
    per_byte = shared / np.where(across, network.bandwidth, network.node_bandwidth)
    parts = run.count / run.schedule.chunks_per_buffer * per_byte
    ended = np.zeros((run.num_steps + 1, len(nbytes)))  # the end of each step; the last row is the beginning
    for begin, end in zip(run.bounds[:-1], run.bounds[1:], strict=True):
        sends, receives = run.send_step[begin:end], run.recv_step[begin:end]
        start = np.maximum(ended[run.before[sends]], ended[run.before[receives]])
        finish = start + alpha[begin:end] + parts[begin:end, None] * nbytes
        for steps in (sends, receives):  # in one round a step has at most one send and one receive
            ended[steps] = np.maximum(ended[steps], finish)
    return ended.max(0)


def _sharing(run: Trace, network: Network, across: np.ndarray) -> np.ndarray:
    """The factor by which each message between nodes is slower because other messages use the same links."""
    links = network.links_per_node or network.per_node
    num_nodes = -(-run.num_ranks // network.per_node)
    round_ = np.repeat(np.arange(run.num_rounds), np.diff(run.bounds)) * num_nodes
    load = np.ones(len(round_))
    for rank in (run.source, run.destination):
        place = round_ + rank % run.num_ranks // network.per_node
        load = np.maximum(load, np.bincount(place[across], minlength=run.num_rounds * num_nodes)[place])
    return np.maximum(1, load / links)


def _walked(schedule: Schedule, network: Network) -> Trace:
    """The trace of all ranks, or of a few nodes if all other nodes behave the same."""
    num_ranks = math.lcm(schedule.period or schedule.size, network.per_node)
    return trace(schedule, num_ranks if schedule.size % num_ranks == 0 else None)


def _pipeline_seconds(operation: str, algorithm: str, size: int, network: Network, nbytes: np.ndarray) -> np.ndarray:
    """Seconds for each of SEGMENTS and each size."""
    runs: dict[int, Trace] = {}

    def walked(k: int, segment: np.ndarray) -> np.ndarray:
        """The time of k segments of `segment` bytes."""
        if k not in runs:
            runs[k] = trace(build(operation, algorithm, size, num_segments=k))
        return seconds(runs[k], network, segment * runs[k].schedule.num_chunks)

    rows = []
    for k in SEGMENTS:
        segment = nbytes / build(operation, algorithm, size, num_segments=k).num_chunks
        if k <= _LONG:
            rows.append(walked(k, segment))
        else:
            long = walked(_LONG, segment)
            rows.append(long + (k - _LONG) * (long - walked(_SHORT, segment)) / (_LONG - _SHORT))
    return np.array(rows)
