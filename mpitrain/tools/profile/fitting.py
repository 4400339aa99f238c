"""The layout of a run's settings, and a machine for the planner's cost model that is fitted to a profile. No torch, no MPI."""

from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from mpitrain.job.config import Config
from mpitrain.job.record.machine.machine import Efficiency, Machine
from mpitrain.tools.plan.layout import MPITRAIN, RankLayout
from mpitrain.tools.plan.price import Price, price
from mpitrain.tools.plan.transformer import Transformer
from mpitrain.tools.profile.parts import LAYERS, Parts


class Figures(NamedTuple):
    """Of a step, in seconds: means over the ranks, `compute_s` of the busiest one. Bytes of one rank."""

    step_s: float
    compute_s: float
    """Forward and backward, without communication."""
    optimizer_s: float
    transfer_s: float
    """Communication that nothing hides, without waits."""
    data_s: float
    others_s: float
    """Data, waits for late ranks, checks and the rest, which the model does not have."""
    flops_per_s: float
    """Of a large matrix product on one rank."""
    num_nodes: int
    memory: float
    is_cpu: bool


def figures_of(parts: Parts, flops_per_s: float, num_nodes: int, *, is_cpu: bool, memory: float) -> Figures:
    """What the cost model needs of a profile."""
    computed = [a + b for a, b in zip(parts.of_kind("forward"), parts.of_kind("backward"), strict=True)]
    optimizer_s = fmean(parts.of("optimizer", "own work"))
    layers = [layer for layer in LAYERS if layer != "other stages"]
    return Figures(
        step_s=parts.step_s,
        compute_s=max(computed),
        optimizer_s=optimizer_s,
        transfer_s=fmean(parts.of_kind("transfer")),
        data_s=fmean(parts.of("data", "own work")),
        others_s=fmean(parts.of_kind("own work")) - optimizer_s + fmean(parts.of_kind("wait", layers)),
        flops_per_s=flops_per_s,
        num_nodes=num_nodes,
        memory=memory,
        is_cpu=is_cpu,
    )


def layout_of(config: Config, num_ranks: int, machine: Machine) -> RankLayout:
    """The layout of a run's settings."""
    parallel, train = config.parallel, config.train
    data = num_ranks // (parallel.tensor * parallel.pipeline)
    is_two = {"zb-v", "dualpipe-v"} & {parallel.schedule}
    return RankLayout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=data,
        copies=parallel.copies,
        zero=parallel.stage if data > 1 else 0,
        schedule=parallel.schedule if parallel.pipeline > 1 else "1f1b",
        stages_per_rank=parallel.stages_per_rank or (2 if is_two or parallel.schedule == "interleaved" else 1),
        micro=max(train.rows(data), 1),
        batch=train.batch,
        sequence=parallel.sequence and parallel.tensor > 1,
        recompute=parallel.checkpoint_activations,
        resident=machine.shares_memory and parallel.stage > 0 and data > 1 and parallel.storage != "private",
    )


def fitted(config: Config, model: Transformer, num_ranks: int, figures: Figures) -> Machine:
    """A machine whose rates are those of the figures: of matrix multiplications, memory (by the optimizer's step) and communication.

    What the figures do not tell is a usual value: latencies, and links that the step does not use.
    """
    per_node = max(num_ranks // figures.num_nodes, 1)
    element = 4 if config.parallel.param_dtype == "float32" else 2
    machine = Machine(
        name="fitted",
        flops=figures.flops_per_s,
        memory=figures.memory,
        memory_bandwidth=1e10 if figures.is_cpu else 1e12,
        ranks_per_node=per_node,
        node_bandwidth=5e9 if figures.is_cpu else 1e11,
        bandwidth=1e9 if figures.is_cpu else 1e10,
        node_latency_s=5e-6,
        latency_s=2e-5,
        launch_s=1e-5 if figures.is_cpu else 3e-6,
        efficiency=Efficiency(
            product=1.0, attention=1.0, stream=1.0, node_link=1.0, link=1.0, overlap=0.0 if figures.is_cpu else 0.9, memory=0.9
        ),
        element_bytes=element,
        shares_memory=figures.is_cpu,
    )  # fmt: skip
    layout = layout_of(config, num_ranks, machine)

    def of(tried: Machine) -> Price:
        return price(model, tried, MPITRAIN, layout)

    def computed(tried: Machine) -> float:
        seconds = of(tried).seconds
        return seconds["compute"] + seconds["again"]

    if figures.optimizer_s > 0:
        rate = machine.memory_bandwidth * of(machine).seconds["optimizer"] / figures.optimizer_s
        machine = replace(machine, memory_bandwidth=max(rate, machine.memory_bandwidth / 10))
    for tries in range(40):
        if computed(machine) <= figures.compute_s:
            break
        # Kernels whose tensors fit the cache are faster than the optimizer, whose tensors do not.
        machine = replace(
            machine, flops=1.2 * machine.flops, memory_bandwidth=machine.memory_bandwidth * (1.5 if tries < 5 else 1.0)
        )
    low, high = 1e-3, 1.0
    for _ in range(20):
        share = (low * high) ** 0.5
        tried = replace(machine, efficiency=replace(machine.efficiency, product=share, attention=share))
        low, high = (share, high) if computed(tried) > figures.compute_s else (low, share)
    machine = replace(machine, efficiency=replace(machine.efficiency, product=high, attention=high))
    sent = of(machine).sent.values()
    over_network = sum(each.network_bytes for each in sent)
    within_node = sum(each.node_bytes for each in sent)
    if figures.transfer_s > 0 and over_network:
        return replace(machine, bandwidth=max(over_network / figures.transfer_s, 1e6))
    if figures.transfer_s > 0 and within_node:
        return replace(machine, node_bandwidth=max(within_node / figures.transfer_s, 1e6))
    return machine
