"""Bytes of a run by kind, from its settings and the number of ranks."""

from typing import NamedTuple

import torch

from mpitrain.config import Config, ConfigError, check_ranks
from mpitrain.data import scan
from mpitrain.memory.step import measure, takes_grads_over, units_of
from mpitrain.models import build
from mpitrain.sharding.unit.layout import lay_out

MASTER_BYTES = 4  # bytes per element of the shards, of their gradients and of each of Adam's two moments

# Measured on Linux x86-64, torch 2.13 for CPUs, Open MPI 5, a model of 0.1 M parameters; 1 and 2 ranks.
PROCESS_BYTES = 255_000_000
"""The memory of each process after some steps: Python, and allocations of torch and MPI."""
LIBRARY_BYTES = 122_000_000
"""The pages of the libraries' files, which all processes of a node share."""
RING_BYTES = 2 << 20
"""The node's shared memory that collectives use per rank: see collectives/transports/node/staged.py."""
HEAP_SHARE = 1.0
"""The most freed memory that glibc's heap keeps between pieces in use, as a share of the activations. The fragmentation of the heap
differs between two runs of one command. Measured: 0.2 to 1.0, twice 1.3 to 1.5 (stage 1, and a progress thread)."""
HEAP_SHARE_AGAIN = 2.0
"""The same with activation checkpointing: the temporary tensors of a block leave holes between tensors that are kept, and the tensors
of the next block do not fit into these holes. Measured: 0.7 to 2.1."""

KINDS = {
    "parameters": "shards, fp32, which the optimizer updates; 0 if they are rows of the full parameters",
    "gradients": "gradients of the shards, fp32; full gradients that wait for their reduction",
    "optimizer": "Adam's two moments, fp32",
    "full parameters": "the parameters that forward and backward use",
    "gradient buffers": "the gradients of two units during their reduction",
    "activations": "tensors kept for the backward, and temporary tensors",
    "allocator": "freed memory that the allocator keeps, at most",
    "data": "the files, one copy per node",
    "checkpoint": "the copy from which a background save writes",
    "process": "Python, torch, MPI: measured",
}
"""The kinds of memory, and their meaning."""


class Prediction(NamedTuple):
    """Bytes by kind. Memory that N ranks share counts 1/N for each of them, as in PSS."""

    num_ranks: int
    num_nodes: int
    num_parameters: int
    storage: str  # resident, kept or gathered
    rank: dict[str, int]  # the rank that needs most
    node: dict[str, int]  # the node that needs most: the sum over its ranks
    shared: int  # the part of `node` that is in shared memory (/dev/shm)

    def to_dict(self) -> dict[str, object]:
        """The fields and the totals for JSON."""
        totals = {"rank_total": sum(self.rank.values()), "node_total": sum(self.node.values())}
        return {**self._asdict(), **totals}


def predict(config: Config, num_ranks: int, num_nodes: int = 1) -> Prediction:
    """The peak memory of a run with these settings, on CPUs. Each node has the same number of consecutive ranks.

    ConfigError for numbers of ranks and nodes that do not fit the settings or each other, ValueError for data that do not exist.
    """
    if num_ranks < 1 or num_nodes < 1 or num_ranks % num_nodes:
        raise ConfigError(f"memory: {num_ranks} ranks cannot be spread evenly over {num_nodes} nodes")
    check_ranks(config, num_ranks)
    parallel = config.parallel
    if parallel.tensor > 1:
        raise ConfigError("memory: the prediction does not know parallel.tensor yet; take --parallel.tensor 1")
    if parallel.device == "cuda":
        raise ConfigError("memory: no prediction for GPUs yet; pass --parallel.device cpu")
    with torch.device("meta"):
        model = build(config.model.resolve())
    group = 1 if parallel.stage == 0 else num_ranks // parallel.copies  # ranks that share one copy
    storage = "kept"
    if parallel.stage > 0 and parallel.storage != "private":
        storage = "resident"
    elif parallel.stage == 3 and group > 1:
        storage = "gathered"
    equal = storage != "resident"
    layouts = [lay_out([tuple(param.shape) for param in unit], group, equal=equal) for unit in units_of(model)]
    numel = sum(layout.numel for layout in layouts)
    full_bytes = numel * getattr(torch, parallel.param_dtype).itemsize
    in_place = storage != "gathered" and parallel.param_dtype == "float32"
    adopted = takes_grads_over(config, num_ranks)
    reduce_bytes = getattr(torch, parallel.reduce_dtype).itemsize
    # The mean gradient of a unit (with one rank: the gradient of a parameter) has separate memory until it is added to the shards'.
    is_apart = not adopted and (config.train.accumulate > 1 or parallel.reduce_dtype != "float32")
    longest = max(param.numel() for param in model.parameters())
    held_grads = [MASTER_BYTES * max(layout.counts) for layout in layouts]
    step = measure(config, num_ranks, held_grads, gathered=storage == "gathered")

    heap_share = HEAP_SHARE_AGAIN if parallel.checkpoint_activations != "none" else HEAP_SHARE

    on_node = num_ranks // num_nodes
    corpus = scan(config.data.path, config.data.suffixes, config.data.heldout)
    data_bytes = corpus.train.num_tokens + corpus.heldout.num_tokens
    buffer_bytes = (
        0 if num_ranks == 1 else min(len(layouts), 2) * max(layout.numel for layout in layouts) * reduce_bytes
    )

    def of_rank(rank: int) -> dict[str, int]:
        index = rank % group
        counts = [layout.counts[index] for layout in layouts]
        held = MASTER_BYTES * sum(counts)
        lasting = {"resident": full_bytes // _num_beside(rank, group, on_node), "kept": full_bytes, "gathered": 0}[
            storage
        ]
        return {
            "parameters": 0 if in_place else held,
            "gradients": step["gradients"] + is_apart * reduce_bytes * (max(counts) if num_ranks > 1 else longest),
            "optimizer": 2 * held,
            "full parameters": lasting + step["full parameters"],
            "gradient buffers": buffer_bytes,
            "activations": step["activations"],
            "allocator": int(heap_share * step["heap"]),
            "data": data_bytes // on_node,
            "checkpoint": 3 * held if config.checkpoint.background and rank < group else 0,
            "process": PROCESS_BYTES + LIBRARY_BYTES // on_node + (RING_BYTES if on_node > 1 else 0),
        }

    ranks = [of_rank(rank) for rank in range(num_ranks)]
    nodes = [ranks[first : first + on_node] for first in range(0, num_ranks, on_node)]
    sums = [{kind: sum(rank[kind] for rank in node) for kind in KINDS} for node in nodes]
    most = max(sums, key=lambda node: sum(node.values()))
    in_shared = most["data"] + most["gradient buffers"] + (most["full parameters"] if storage == "resident" else 0)
    return Prediction(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_parameters=sum(param.numel() for param in model.parameters()),
        storage=storage,
        rank=max(ranks, key=lambda rank: sum(rank.values())),
        node=most,
        shared=in_shared + (RING_BYTES * on_node if on_node > 1 else 0),
    )


def _num_beside(rank: int, group: int, on_node: int) -> int:
    """The number of ranks, including this one, that are on its node and hold shards of the same copy."""
    first = max(rank // group * group, rank // on_node * on_node)
    return min((rank // group + 1) * group, (rank // on_node + 1) * on_node) - first
