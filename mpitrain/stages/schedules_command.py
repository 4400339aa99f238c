"""`python -m mpitrain schedules check|show`: proves and draws the schedules of pipelines. One process, without MPI."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mpitrain.stages.schedules import SCHEDULES, Schedule, Times
from mpitrain.stages.schedules.check import ScheduleError, check, drawn_schedules, small_schedules
from mpitrain.stages.schedules.drawing import svg, text
from mpitrain.stages.schedules.timeline import timeline


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. ValueError for numbers for which a schedule is not defined."""
    options = _parser().parse_args(argv)
    return _check(options) if options.command == "check" else _show(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mpitrain schedules", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True)
    proving = commands.add_parser("check", help="prove every schedule for many numbers of ranks and micro-batches")
    proving.add_argument("--ranks", type=_count, default=16, help="all numbers up to this one (default: 16)")
    proving.add_argument("--micro-batches", type=_count, default=32, help="all numbers up to this one (default: 32)")
    proving.add_argument(
        "--seconds", type=float, default=20, help="then random numbers up to 64 and 256, for this time (default: 20)"
    )
    proving.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    drawing = commands.add_parser("show", help="draw one schedule, and print its idle time and activations")
    drawing.add_argument("schedule", choices=[*SCHEDULES])
    drawing.add_argument("--ranks", type=_count, default=4, help="default: 4")
    drawing.add_argument("--micro-batches", type=_count, default=8, help="default: 8")
    drawing.add_argument("--stages-per-rank", type=_count, default=2, help="of interleaved (default: 2)")
    drawing.add_argument(
        "--times",
        type=float,
        nargs=4,
        default=[1, 1, 1, 0],
        metavar=("F", "I", "W", "M"),
        help="seconds of a rank for a micro-batch: forward, gradient of the input, gradients of weights; and a message (1 1 1 0)",
    )
    drawing.add_argument("--svg", type=Path, metavar="FILE", help="write the picture to this file instead")
    return parser


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {word}")
    return int(word)


def _check(options: argparse.Namespace) -> int:
    proved: Counter[str] = Counter()
    problems: dict[str, str] = {}

    def prove(schedule: Schedule) -> None:
        proved[schedule.name] += 1
        try:
            check(schedule)
        except ScheduleError as error:
            problems.setdefault(schedule.name, f"{_told(schedule)}: {error}")

    for schedule in small_schedules(options.ranks, options.micro_batches):
        prove(schedule)
    began = time.monotonic()
    for schedule in drawn_schedules(options.seed):
        if time.monotonic() - began > options.seconds:
            break
        prove(schedule)
    table = Table("schedule", "cases", "proved", box=None, header_style="")
    for name, count in proved.items():
        table.add_row(name, f"{count:,}", problems.get(name, "yes"))
    console = Console()
    console.print(table)
    console.print(
        "Proved: each forward and backward runs once, in a possible order; no rank waits for ever; messages between two ranks are in "
        "order; activations and idle time equal their formulas.",
        style="dim",
    )
    return 1 if problems else 0


def _show(options: argparse.Namespace) -> int:
    more = {"stages_per_rank": options.stages_per_rank} if options.schedule == "interleaved" else {}
    schedule = SCHEDULES[options.schedule](options.ranks, options.micro_batches, **more)
    check(schedule)
    times = Times(*options.times)
    run = timeline(schedule, times)
    idle = [run.span(rank) - schedule.num_micro * times.work for rank in range(schedule.num_ranks)]
    console = Console(soft_wrap=True)
    if options.svg is not None:
        title = f"{_told(schedule)}: {run.total:g} s"
        options.svg.write_text(svg([(title, run)], stages_per_rank=schedule.stages_per_rank))
    else:
        unit = min(seconds for seconds in times[:3] if seconds > 0) / schedule.stages_per_rank
        for line in text(run, unit):
            console.print(line)
    share = max(idle) / max(map(run.span, range(schedule.num_ranks)))
    held = ", ".join(str(schedule.peak(rank)) for rank in range(schedule.num_ranks))
    console.print(f"{run.total:g} s; idle at most {max(idle):g} s a rank ({share:.1%})")
    console.print(f"activations at most, in forwards of a stage, by rank: {held}")
    return 0


def _told(schedule: Schedule) -> str:
    stages = f", {schedule.stages_per_rank} stages each" if schedule.stages_per_rank > 1 else ""
    return f"{schedule.name} on {schedule.num_ranks} ranks{stages}, {schedule.num_micro} micro-batches"
