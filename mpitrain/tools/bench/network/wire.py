"""`python -m mpitrain bench wire`: the bytes between nodes and the time of a step for each format."""

import argparse
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from collectives import Communicator, network_bytes
from collectives.bench.kit.running import writable
from collectives.bench.kit.turns import Seconds, mean_rank, slowest, spread, take_turns
from collectives.codec.choice import chosen
from collectives.codec.formats import FORMATS
from collectives.shared.arguments import add_json, names_of
from collectives.shared.terminal import console, positive
from mpitrain.tools.bench.network.cards import sent_bytes
from mpitrain.tools.bench.network.results import EXACT, WireLaunch, WireRow, wire_tables
from mpitrain.tools.bench.options import Parser, parse_shapes
from mpitrain.tools.bench.results import BenchCase

if TYPE_CHECKING:
    from mpitrain.tools.bench.model import TrainedModel, TrainingSetup
    from mpitrain.tools.bench.timing import TimedSteps

STAGES = ("0", "1", "2", "3")
WARM_UP = 2


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. Errors are raised on all ranks."""
    with comm.together():
        options = _parse(words)
    writable(comm, options.json)
    beside = None
    with comm.together():
        if options.beside:
            beside = WireLaunch.read(options.beside)
            _check_beside(beside, comm, options)
    launch = _measured(options, comm)
    with comm.together():
        if comm.rank == 0:
            if options.json:
                launch.write(options.json)
            console().print(*wire_tables(launch, beside), sep="\n")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpitrain bench wire",
        description="Time training steps that send gradients, and in stage 3 weights, between nodes in several formats, in turn, in "
        "one launch (under mpirun), and count the bytes. First run it with the same ranks on one node and --json, then on several "
        "nodes with --beside.",
    )
    parser.add_argument(
        "--shape", type=parse_shapes, default=[(512, 6, 1)], metavar="WxLxB",
        help="width x layers x sequences a rank (default: 512x6x1, 19 M parameters; 256x4x1 has 3.3 M)",
    )  # fmt: skip
    parser.add_argument("--heads", type=positive, default=8, help="attention heads per layer (default: %(default)s)")
    parser.add_argument("--context", type=positive, default=128, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="threads per rank (default: %(default)s)")
    parser.add_argument(
        "--stages", type=names_of(STAGES), default=["0", "3"], metavar="N,..", help="of ZeRO (default: 0,3)"
    )
    parser.add_argument(
        "--wires", type=names_of(list(FORMATS)), default=[EXACT, "bf16", "int8"], metavar="NAME,..",
        help=f"of {', '.join(FORMATS)} (default: fp32,bf16,int8). auto is none of them: it measures, and takes int8 or fp32",
    )  # fmt: skip
    parser.add_argument("--steps", type=positive, default=8, help="timed steps of each (default: %(default)s)")
    parser.add_argument(
        "--beside",
        metavar="FILE",
        help="a --json file of the same ranks on one node: the table then also has the time of the step there, the time beyond it, and "
        "the ratio of this to that of fp32",
    )
    add_json(parser)
    given = parser.parse_args(list(words))
    if len(given.shape) > 1:
        parser.error("--shape takes one shape")
    (width, layers, batch) = given.shape[0]
    given.case = BenchCase(width, layers, given.heads, given.context, batch)
    try:
        given.case.config()
    except ValueError as error:
        parser.error(str(error))
    return given


def _check_beside(beside: WireLaunch, comm: Communicator, options: argparse.Namespace) -> None:
    there = (beside.nodes, beside.ranks, beside.threads, beside.case)
    here = (1, comm.size, options.threads, options.case)
    if there != here:
        names = ("nodes", "ranks", "threads", "case")
        differing = [f"{name} {a}, not {b}" for name, a, b in zip(names, there, here, strict=True) if a != b]
        raise ValueError(
            f"bench wire: {options.beside} has {'; '.join(differing)}; expected the same ranks on one node"
        )


def _measured(options: argparse.Namespace, comm: Communicator) -> WireLaunch:
    from mpitrain.job.config import ParallelConfig
    from mpitrain.job.train.hardware import take_hardware
    from mpitrain.tools.bench.model import TrainingSetup

    hardware = take_hardware(comm, ParallelConfig(threads=options.threads, bind=False, device="cpu"))
    import torch

    rows: list[WireRow] = []
    with ExitStack() as ended:
        setup = TrainingSetup(comm, hardware.device, torch.float32, ended, options.case.batch)
        for stage in map(int, options.stages):
            rows += _rows(options, stage, setup)
            gc.collect()  # hooks and models refer to each other
    return WireLaunch.of(
        comm, threads=hardware.threads, case=options.case, codec=chosen().name, steps=options.steps, rows=rows
    )


def _rows(options: argparse.Namespace, stage: int, setup: "TrainingSetup") -> list[WireRow]:
    """The steps of one stage with each format, in turn."""
    from mpitrain.tools.bench.timing import TimedSteps

    comm = setup.comm
    steps = {
        wire: _Counted(TimedSteps(_model(options.case, setup, stage, wire), options.case, setup))
        for wire in options.wires
    }
    series = take_turns(steps, rounds=options.steps, warm_up=WARM_UP)
    means, longest = mean_rank(comm, series), slowest(comm, series)
    losses = np.array([counted.steps.loss for counted in steps.values()])
    comm.all_reduce(losses, "avg")

    def of_a_node(wire: str, what: str) -> int:
        return round(float(np.median(means[wire, what])) * comm.size / comm.num_nodes)

    return [
        WireRow(
            stage, wire, *spread(longest[wire, "step"]), sent_bytes=of_a_node(wire, "sent"),
            counted_bytes=of_a_node(wire, "counted"), loss=float(loss),
        )
        for wire, loss in zip(steps, losses, strict=True)
    ]  # fmt: skip


class _Counted:
    """A contestant (see collectives/bench/kit/turns.py): steps, and the bytes that they send to other nodes."""

    def __init__(self, steps: "TimedSteps") -> None:
        self.steps, self._comm = steps, steps.setup.comm

    def turn(self, round_: int) -> Seconds:
        """The seconds of a step; `counted`: bytes of this rank's collectives; `sent`: on one rank of a node, those of its devices."""
        sent, counted = sent_bytes(self._comm), network_bytes()
        taken = self.steps.turn(round_)
        self._comm.barrier()
        now = network_bytes()
        return {"step": taken["step"], "sent": sent_bytes(self._comm) - sent, "counted": now - counted}


def _model(case: BenchCase, setup: "TrainingSetup", stage: int, wire: str) -> "TrainedModel":
    """A GPT of `fully_shard`, block by block."""
    import torch

    from mpitrain.models import GPT
    from mpitrain.sharding import fully_shard
    from mpitrain.tools.bench.models import Ours
    from mpitrain.weights.initial_values import initialize

    with torch.device("meta"):
        model = GPT(case.config())
    shard = partial(fully_shard, mesh=setup.comm, stage=stage, wire=wire, wire_weights=wire if stage == 3 else EXACT)
    for module in (*model.blocks, model):
        shard(module)
    initialize(model)
    return Ours(model)
