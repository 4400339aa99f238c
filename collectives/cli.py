"""`python -m collectives check | info | bench`: prove the schedules, show what this machine offers, measure.

Each prints once, on rank 0. Bad input ends with one line and exit code 2 on all ranks. `check` needs no MPI.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NoReturn, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import collectives
from collectives import bench
from collectives.diagnosis import on_all_ranks
from collectives.dtypes import TABLE, dtype_of
from collectives.launcher import is_live_terminal, launched_rank
from collectives.schedules import BUILDERS
from collectives.schedules.check import ScheduleError, check
from collectives.selection import ALGORITHMS

T = TypeVar("T")


class UsageError(Exception):
    """What the user asked for cannot be done; the text is all there is to say."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (sys.argv's by default) and return the exit code."""
    try:
        options = _parser().parse_args(arguments)
        if options.command == "check":
            return run_check(options.ranks)
        if options.command == "info":
            return run_info()
        return run_bench(options)
    except (UsageError, OSError) as error:
        line = Text(f"collectives: {error}")
        if isinstance(error, UsageError) or on_all_ranks(error):
            _print_once(line, stderr=True)
        else:
            _console(stderr=True).print(line)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m collectives", description="Collectives between MPI ranks: check, info, bench.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="check | info | bench")
    checking = commands.add_parser("check", help="prove every schedule for several numbers of ranks (runs without MPI)")
    checking.add_argument(
        "--ranks", type=_ranks, default=[1, 2, 3, 4, 7, 8, 16, 64], metavar="N,N,..", help="default: 1,2,3,4,7,8,16,64"
    )
    commands.add_parser("info", help="show the MPI library, ranks, nodes, shared memory, dtypes and algorithms")
    measuring = commands.add_parser("bench", help="time every algorithm beside the MPI library's own (under mpirun)")
    measuring.add_argument("--op", choices=bench.OPERATIONS, default="all_reduce", help="default: all_reduce")
    measuring.add_argument(
        "--sizes",
        type=_or_usage_error(bench.parse_sizes),
        default="1KiB..64MiB",
        help="bytes of the whole array: a range in steps of 4, or a list such as 1KiB,3MiB (default: 1KiB..64MiB)",
    )
    measuring.add_argument("--dtype", type=_or_usage_error(lambda name: dtype_of(name).name), default="float32")
    measuring.add_argument("--rounds", type=_positive, default=30, help="timed calls of each (default: 30)")
    measuring.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return parser


def _or_usage_error(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` for argparse, which keeps the text of an ArgumentTypeError alone."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _ranks(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _print_once(*shown: RenderableType, stderr: bool = False) -> None:
    """Print on rank 0. Collective where a launcher has started several ranks, and else done without MPI.

    Returns on all ranks when it is printed: a launcher ends the job as soon as one rank has ended with an error.
    """
    comm = collectives.world() if launched_rank() >= 0 else None
    if comm is None or comm.rank == 0:
        _console(stderr).print(*shown, sep="\n")
    if comm is not None:
        comm.barrier()


def _console(stderr: bool = False) -> Console:
    return Console(
        stderr=stderr, soft_wrap=stderr, highlight=False, force_terminal=None if stderr else is_live_terminal()
    )


def run_check(sizes: Sequence[int]) -> int:
    """Prove every schedule for these numbers of ranks, from the first and the last rank as root; 1 if one is wrong."""
    table = Table("operation", "algorithm", "ranks", "rounds", "traffic", "formula", "ok", box=box.SIMPLE_HEAD)
    problems = []
    for operation, algorithms in BUILDERS.items():
        for algorithm, build in algorithms.items():
            for size in sizes:
                formula = build(size, 0).cost
                shown = f"{formula.rounds}, {float(formula.traffic):.4g}"
                try:
                    costs = {check(build(size, root)) for root in (0, size - 1)}
                    if costs != {formula}:
                        raise ScheduleError(f"costs {sorted(costs)}, but the formula says {formula}")
                except ScheduleError as error:
                    problems.append(f"{operation} {algorithm}, {size} ranks: {error}")
                    table.add_row(operation, algorithm, str(size), "", "", shown, "NO", style="bold red")
                else:
                    rounds, traffic = str(formula.rounds), f"{float(formula.traffic):.4g}"
                    table.add_row(operation, algorithm, str(size), rounds, traffic, shown, "yes")
            table.add_section()
    legend = Text("rounds: steps on the longest chain; traffic: what the busiest rank sends, in whole arrays")
    _print_once(table, legend, *(Text(problem, "bold red") for problem in problems))
    return 1 if problems else 0


def run_info() -> int:
    """Show what there is here: under mpirun all its ranks, else this process alone."""
    from collectives.transports import memory, mpi

    comm = collectives.world()
    folder = memory.folder()
    with comm.together(f"shared-memory folder {folder}"):
        room = os.statvfs(folder)
    nodes: dict[str, int] = {}
    for name in comm.all_gather_object(os.uname().nodename):
        nodes[name] = nodes.get(name, 0) + 1
    if comm.rank == 0:
        table = Table(show_header=False, box=box.SIMPLE)
        table.add_row("MPI library", mpi.library_version())
        table.add_row("mpi4py", version("mpi4py"))
        table.add_row("ranks", str(comm.size))
        table.add_row("nodes", f"{comm.num_nodes} ({', '.join(f'{name}: {n}' for name, n in nodes.items())})")
        free = bench.show_bytes(room.f_bavail * room.f_frsize)
        table.add_row("shared memory", f"{folder}, {free} free" + ("" if comm.num_nodes == 1 else " on rank 0's node"))
        table.add_row("dtypes", ", ".join(TABLE))
        for operation, algorithms in ALGORITHMS.items():
            table.add_row(operation, ", ".join(("auto", *algorithms)))
        _console().print(table)
    return 0


def run_bench(options: argparse.Namespace) -> int:
    """Measure, print the table, and write the JSON file."""
    comm = collectives.world()
    if comm.size == 1:
        raise UsageError("bench needs at least two ranks: mpirun -np 2 python -m collectives bench")
    if options.json:
        with comm.together():  # found now rather than when all is measured
            if comm.rank == 0:
                open(options.json, "a").close()
    results = bench.measure(comm, options.op, options.sizes, dtype_of(options.dtype), options.rounds)
    if comm.rank == 0:
        _console().print(bench.table(comm, results))
        if options.json:
            bench.write_json(options.json, comm, results)
    return 0
