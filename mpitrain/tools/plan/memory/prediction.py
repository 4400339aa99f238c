"""Bytes of a run by kind, from its settings and the number of ranks."""

from collections import Counter
from math import prod
from typing import NamedTuple

import torch

from collectives.transports.node.staged import ring_bytes
from mpitrain.job.config import Config, ConfigError, check_ranks
from mpitrain.job.data import scan
from mpitrain.job.data.loading import has_documents
from mpitrain.models import build, num_parameters
from mpitrain.sharding.unit.host_arrays import gradient_buffers
from mpitrain.sharding.unit.layout import ShardLayout, lay_out
from mpitrain.tools.plan.memory.stage_ranks import stage_rank, take_stages
from mpitrain.tools.plan.memory.step import StepRank, measure, takes_grads_over, units_of
from mpitrain.tools.plan.memory.tensor_ranks import TensorRank, cut

Shapes = tuple[tuple[tuple[int, ...], ...], ...]
"""The shapes of the parameters of each unit."""

MASTER_BYTES = 4  # bytes per element of the shards, of their gradients and of each running mean of the optimizer
NUM_MEANS = {"adamw": 2, "lamb": 2, "muon": 2, "lars": 1, "sgd": 1}
"""Running means of an optimizer. Muon has two of the parameters that are no matrices, and one of the matrices."""

# Measured on Linux x86-64, torch 2.13 for CPUs, Open MPI 5, a model of 0.1 M parameters; 1 and 2 ranks.
PROCESS_BYTES = 190_000_000
"""The memory of each process after some steps: Python, and allocations of torch and MPI."""
COMPILER_BYTES = 70_000_000
"""torch's compiler, which torch's checkpoints of activations import."""
LIBRARY_BYTES = 122_000_000
"""The pages of the libraries' files, which all processes of a node share."""
HEAP_SHARE = 1.0
"""The most freed memory that glibc's heap keeps between pieces in use, as a share of the activations. The fragmentation of the heap
differs between two runs of one command. Measured: 0.2 to 1.0, twice 1.3 to 1.5 (stage 1, and a progress thread)."""
HEAP_SHARE_AGAIN = 2.0
"""The same with activation checkpointing: the temporary tensors of a block leave holes between tensors that are kept, and the tensors
of the next block do not fit into these holes. Measured: 0.7 to 2.1."""

KINDS = {
    "parameters": "shards, fp32, which the optimizer updates; 0 if they are rows of the full parameters",
    "gradients": "gradients of the shards, fp32; full gradients that wait for their reduction",
    "optimizer": "the optimizer's running means, fp32, of muon at most; with local steps also the outer parameters and their momentum",
    "full parameters": "the parameters that forward and backward use",
    "gradient buffers": "the gradients of two units during their reduction",
    "activations": "tensors kept for the backward, and temporary tensors",
    "shared activations": "tensors that tensor-parallel ranks share: inputs of regions, and parts of sums",
    "allocator": "freed memory that the allocator keeps, at most",
    "data": "the files, one copy per node",
    "checkpoint": "the copy from which a background save writes",
    "copies": "copies of the state in node memory (train.elastic): two generations, also for another node if there is one",
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
    parallel, reduce_bytes = config.parallel, getattr(torch, config.parallel.reduce_dtype).itemsize
    if parallel.device == "cuda":
        raise ConfigError(
            "memory: no prediction for GPUs yet; pass --parallel.device cpu, or see python -m mpitrain plan"
        )
    num_data = num_ranks // (parallel.tensor * parallel.pipeline)
    group = (
        1 if parallel.stage == 0 else num_data // parallel.copies
    )  # ranks that share one copy of a tensor rank's part
    storage = "kept"
    if parallel.stage > 0 and parallel.storage != "private":
        storage = "resident"
    elif parallel.stage == 3 and group > 1:
        storage = "gathered"
    # Gathers of weights between nodes may be encoded: then shards are masters in separate memory.
    is_encoded = parallel.wire_weights != "fp32" and group * parallel.tensor > num_ranks // num_nodes
    in_place = storage != "gathered" and parallel.param_dtype == "float32" and not is_encoded
    adopted = takes_grads_over(config, num_data)
    # The mean gradient of a unit (with one rank: the gradient of a parameter) has separate memory until it is added to the shards'.
    # With slices the sum of the last slices becomes the mean.
    is_apart = not (adopted or config.train.slices) and (
        config.train.accumulate > 1 or parallel.reduce_dtype != "float32"
    )
    num_means = NUM_MEANS[config.optim.name]
    is_checkpointed = parallel.checkpoint_activations != "none"
    heap_share = HEAP_SHARE_AGAIN if is_checkpointed else HEAP_SHARE
    process_bytes = PROCESS_BYTES + COMPILER_BYTES * is_checkpointed

    on_node = num_ranks // num_nodes
    data_bytes = 0  # of documents and tokens, whose files are mapped
    if not (has_documents(config.data) or config.data.has_tokens):
        corpus = scan(
            config.data.path, config.data.suffixes, config.data.heldout, follow_links=config.data.follow_links
        )
        data_bytes = corpus.train.num_tokens + corpus.heldout.num_tokens
    rings = ring_bytes(on_node)
    # Two generations; on several nodes each also for a rank of another node, and after a loss the one before them.
    num_copies = (2 if num_nodes == 1 else 6) if config.train.elastic and config.train.copy_every else 0
    has_momentum = parallel.outer == "nesterov" and parallel.outer_momentum > 0
    num_outer = (1 + has_momentum) * (parallel.local_steps > 0)  # parameters and momentum
    # A copy of the state has Adam's moments, the parameters, and in local steps the outer state. Then each model copy has its own.
    num_kept = [3 + num_outer, 3 * (parallel.local_steps > 0)]
    parts = _Parts(config, num_data, group, storage)

    def of_rank(rank: int) -> dict[str, int]:
        stage, data_rank = divmod(rank // parallel.tensor, num_data)
        part = parts.of(
            TensorRank(rank % parallel.tensor, parallel.tensor, _is_group_on_one_node(rank, parallel.tensor, on_node)),
            stage,
        )
        counts = [layout.counts[data_rank % group] for layout in part.layouts]
        held, step = MASTER_BYTES * sum(counts), part.step
        full_bytes = sum(layout.numel for layout in part.layouts) * getattr(torch, parallel.param_dtype).itemsize
        num_beside = _num_beside(rank, parallel.tensor, num_data, group, on_node)
        lasting = {"resident": full_bytes // num_beside, "kept": full_bytes, "gathered": 0}[storage]
        num_buffers, longest = gradient_buffers([layout.numel for layout in part.layouts])
        if num_data == 1 and not config.train.slices:
            num_buffers = 0
        return {
            "parameters": 0 if in_place else held,
            "gradients": step["gradients"] + is_apart * reduce_bytes * (max(counts) if num_data > 1 else part.longest),
            "optimizer": (num_means + num_outer) * held,
            "full parameters": lasting + step["full parameters"],
            "gradient buffers": num_buffers * longest * reduce_bytes,
            "activations": step["activations"],
            "shared activations": step["shared activations"],
            "allocator": int(heap_share * step["heap"]),
            "data": data_bytes // on_node,
            "checkpoint": num_kept[data_rank >= group] * held if config.checkpoint.background else 0,
            "copies": num_copies * num_kept[data_rank >= group] * held,
            "process": process_bytes + LIBRARY_BYTES // on_node + rings,
        }

    ranks = [of_rank(rank) for rank in range(num_ranks)]
    nodes = [ranks[first : first + on_node] for first in range(0, num_ranks, on_node)]
    sums = [{kind: sum(rank[kind] for rank in node) for kind in KINDS} for node in nodes]
    most = max(sums, key=lambda node: sum(node.values()))
    in_shared = most["copies"]
    if on_node > 1:  # one rank shares nothing
        in_shared += most["data"] + most["gradient buffers"] + most["shared activations"] + rings * on_node
        in_shared += most["full parameters"] if storage == "resident" else 0
    return Prediction(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_parameters=num_parameters(config.model.resolve()),
        storage=storage,
        rank=max(ranks, key=lambda rank: sum(rank.values())),
        node=most,
        shared=in_shared,
    )


class _Part(NamedTuple):
    """The part of the model that one rank of a tensor-parallel group computes with."""

    layouts: list[ShardLayout]  # of its units
    longest: int  # elements of the longest parameter
    step: Counter[str]  # the peak of a step


class _Parts:
    """The parts of all ranks. Parts of the same shapes in the same stage are measured once."""

    def __init__(self, config: Config, num_data: int, group: int, storage: str) -> None:
        self._config, self._num_data, self._group, self._storage = config, num_data, group, storage
        self._shapes: dict[tuple[TensorRank, int], Shapes] = {}
        self._made: dict[tuple[Shapes, int, bool], _Part] = {}

    def of(self, rank: TensorRank, number: int) -> _Part:
        """The part of a rank. `number`: its rank in the pipeline."""
        stage = stage_rank(self._config.parallel, number, self._config.train.micro_batches(self._num_data))
        if (rank, number) not in self._shapes:
            with torch.device("meta"):
                model = build(self._config.model.resolve())
            cut(model, rank, sequence=self._config.parallel.sequence)
            if stage is not None:
                take_stages(model, stage)
            shapes = tuple(tuple(tuple(param.shape) for param in unit) for unit in units_of(model))
            self._shapes[rank, number] = tuple(unit for unit in shapes if unit)
        shapes = self._shapes[rank, number]
        if (key := (shapes, number, rank.is_on_one_node)) not in self._made:
            cuts = self._config.parallel.cut
            layouts = [lay_out(unit, self._group, equal=self._storage != "resident", cut=cuts) for unit in shapes]
            held = tuple(MASTER_BYTES * max(layout.counts) for layout in layouts)
            step = measure(self._config, StepRank(self._num_data, rank, held, self._storage == "gathered", stage))
            self._made[key] = _Part(layouts, max(prod(shape) for unit in shapes for shape in unit), step)
        return self._made[key]


def _is_group_on_one_node(rank: int, size: int, on_node: int) -> bool:
    """Whether the group of `size` neighbours that has `rank` is on one node."""
    first = rank // size * size
    return first // on_node == (first + size - 1) // on_node


def _num_beside(rank: int, tensor: int, num_data: int, group: int, on_node: int) -> int:
    """The number of ranks, including this one, that are on its node and hold shards of the same copy of the same part."""

    def holds(of: int) -> tuple[int, int, int]:
        stage, data_rank = divmod(of // tensor, num_data)
        return stage, of % tensor, data_rank // group

    first = rank // on_node * on_node
    return sum(holds(other) == holds(rank) for other in range(first, first + on_node))
