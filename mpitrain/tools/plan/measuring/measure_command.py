"""`plan --measure FILE` under mpirun: measures, writes the machine file, and prints its constants."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.table import Table

from collectives import Communicator
from collectives.bench.kit.running import writable
from collectives.shared.arguments import positive_seconds
from collectives.shared.terminal import console, positive

SECONDS = 40.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"plan: {message}")


def main(words: Sequence[str], comm: Communicator) -> None:
    """Run the command. Collective. Errors are raised on all ranks."""
    parser = _Parser(
        prog="mpirun -np N python -m mpitrain plan",
        description="Measures the cluster at hand, with one rank for each GPU, or as many ranks on each node as a training has.",
    )
    parser.add_argument(
        "--measure", metavar="FILE.toml", required=True, help="the machine file to write, for --machine"
    )
    parser.add_argument(
        "--threads", type=positive, help="threads of each rank (default: its share of the node's cores)"
    )
    parser.add_argument(
        "--seconds", type=positive_seconds, default=SECONDS, help=f"of the measurement (default: {SECONDS:g})"
    )
    with comm.together():
        options = parser.parse_args(list(words))
    measure_into(options.measure, comm, threads=options.threads, seconds=options.seconds)


def measure_into(path: str, comm: Communicator, *, threads: int | None = None, seconds: float = SECONDS) -> None:
    """Measure on all ranks; rank 0 writes the file and prints. Collective.

    `threads`: of each rank, as the setting parallel.threads. OSError on all ranks, before the measurement, if the file cannot be
    written.
    """
    writable(comm, path)
    # torch takes seconds to import, so it follows the check of the file.
    from mpitrain.job.config import ParallelConfig
    from mpitrain.job.train.hardware import take_hardware
    from mpitrain.tools.plan.measuring.cluster import measured
    from mpitrain.tools.plan.measuring.constants import to_text, to_toml

    hardware = take_hardware(comm, ParallelConfig(threads=threads))
    sections = measured(comm, hardware.device, name=Path(path).stem, seconds=seconds)
    header = (
        f"Measured by `python -m mpitrain plan --measure` on {comm.size} ranks, {hardware.threads} threads each, {comm.num_nodes} "
        f"nodes.\nSeconds, bytes, bytes per second, FLOP/s. Medians of at least 5 rounds, in which all ranks do the same at once: "
        "of\ncomputation the mean of the ranks, of communication the slowest rank. Pairs are of forward and backward."
    )
    with comm.together("writing the machine file"):
        if comm.rank == 0:
            Path(path).write_text(to_toml(sections, header), encoding="utf-8")
            table = Table("", "", title=f"{path}, from {comm.size} ranks", show_header=False)
            for name, constants in sections.items():
                for key, constant in constants.items():
                    shown = f"{constant.value:.4g}" if isinstance(constant.value, float) else to_text(constant.value)
                    table.add_row(f"{name}.{key}" if name else key, shown)
            console().print(table)
