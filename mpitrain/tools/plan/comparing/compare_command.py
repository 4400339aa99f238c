"""`plan --compare MACHINE` under mpirun, and `plan --compare-report FILES` in one process."""

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from collectives import Communicator
from collectives.bench.kit.running import measure_and_show
from collectives.shared.arguments import add_json
from collectives.shared.terminal import console, positive
from mpitrain.job.record.machine import machine as machines
from mpitrain.tools.plan.comparing.cases import layouts, with_changes
from mpitrain.tools.plan.comparing.compare_report import tables
from mpitrain.tools.plan.comparing.results import ComparisonLaunch, LayoutRow
from mpitrain.tools.plan.layout import MPITRAIN
from mpitrain.tools.plan.measuring.small_gpt import GptSize, config_of
from mpitrain.tools.plan.price import price

STEPS = 7


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"plan: {message}")


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. Collective. Errors are raised on all ranks."""
    with comm.together():
        options = _parser().parse_args(list(words))
        machine = machines.load(options.compare)
        size = with_changes(GptSize(), **{name: getattr(options, name) for name in _SIZES})
        chosen = {
            name: layout
            for name, layout in layouts(comm.size, size.batch).items()
            if machine.shares_memory or not layout.resident
        }
        configs = {name: config_of(size, layout, machine) for name, layout in chosen.items()}
        predicted = {name: price(size.transformer, machine, MPITRAIN, layout).step_s for name, layout in chosen.items()}

    def measure() -> ComparisonLaunch:
        from mpitrain.job.config import ParallelConfig
        from mpitrain.job.train.hardware import take_hardware
        from mpitrain.tools.plan.comparing.steps import (
            measured,  # imports torch, so it follows the check of the arguments
        )

        hardware = take_hardware(comm, ParallelConfig(threads=options.threads))
        load = max(comm.all_gather_object(os.getloadavg()[0]))
        seconds = measured(configs, comm, hardware.device, steps=options.steps)
        rows = [LayoutRow(name, predicted[name], middle, least) for name, (middle, least, _) in seconds.items()]
        return ComparisonLaunch.of(
            comm, threads=hardware.threads, size=str(size), steps=options.steps, load=load, rows=rows
        )

    measure_and_show(comm, measure, tables, json=options.json)


def report(words: Sequence[str]) -> None:
    """Print the tables of several launches. ValueError, OSError."""
    parser = _Parser(prog="python -m mpitrain plan", description="Combines the files of several launches.")
    parser.add_argument("--compare-report", nargs="+", metavar="FILE", required=True, help="files of --compare --json")
    files = parser.parse_args(list(words)).compare_report
    console().print(*tables([ComparisonLaunch.read(file) for file in files]), sep="\n")


_SIZES = {"width": "width of the model", "layers": "its blocks", "heads": "its attention heads",
          "context": "tokens of a sequence", "batch": "sequences of a step"}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mpirun -np N python -m mpitrain plan",
        description="Compares predicted with measured steps of a small GPT in about 20 layouts, in turn, in one launch.",
    )
    parser.add_argument("--compare", metavar="NAME|FILE", required=True, help="the machine: a file of plan --measure")
    for name, what in _SIZES.items():
        parser.add_argument(f"--{name}", type=positive, help=f"{what} (default: {getattr(GptSize(), name)})")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"timed steps of each layout (default: {STEPS})")
    parser.add_argument(
        "--threads", type=positive, help="threads of each rank (default: its share of the node's cores)"
    )
    add_json(parser)
    return parser
