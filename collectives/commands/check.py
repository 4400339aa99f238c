"""`python -m collectives check`: proves every schedule, without MPI."""

import argparse
from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from collectives.schedules import BUILDERS, PIPELINED, ROOTED, TWO_LEVEL, Setup
from collectives.schedules.check import EXACT_RANKS, ScheduleError, check, setups
from collectives.schedules.schedule import Cost
from collectives.shared.terminal import Commands, or_usage_error, print_once
from collectives.shared.units import parse_counts, show_counts

DEFAULT_RANKS = "1..64,100,256,1000,4096"
# Limits on size x rounds of an algorithm, by default and with --ranks: rings of thousands of ranks have millions of messages.
DEFAULT_STEPS = 1 << 18
MAX_STEPS = 1 << 23
LEGEND = (
    "Proved: each result contains every contribution exactly once; no deadlock; the same bits on all ranks; rounds (steps on the "
    "longest chain) and traffic (sent by the busiest rank, in whole buffers) equal the literature's formula, shown for the last case. "
    f"A wrong sum of more than {EXACT_RANKS} ranks looks right with a probability of 2^-64."
)


def add_parser(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("check", help="prove every schedule for many numbers of ranks (runs without MPI)")
    parser.add_argument(
        "--ranks",
        type=or_usage_error(parse_counts),
        metavar="N..M,N,..",
        help=f"default: {DEFAULT_RANKS}, but no numbers for which an algorithm has more than {DEFAULT_STEPS} steps in all",
    )


def run(options: argparse.Namespace) -> int:
    """Prove every schedule for these numbers of ranks, and print a row for each algorithm. Returns 1 if a schedule is wrong."""
    sizes, limit = (options.ranks, MAX_STEPS) if options.ranks else (parse_counts(DEFAULT_RANKS), DEFAULT_STEPS)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)  # narrow: 80 columns are enough
    for name in ("operation", "algorithm"):
        table.add_column(f"\n{name}", no_wrap=True)
    table.add_column("proved for\nranks (last case)", overflow="fold", min_width=10)
    for name in ("rounds", "traffic", "formula"):
        table.add_column(f"\n{name}", justify="right", no_wrap=True)
    table.add_column("\nok", no_wrap=True, min_width=3)
    problems = []
    for operation, algorithms in BUILDERS.items():
        for algorithm in algorithms:
            proved, wrong, last, found, formula = _prove(operation, algorithm, sizes, limit)
            problems += wrong
            table.add_row(
                operation,
                algorithm,
                (show_counts(proved) or "none") + (f" ({last})" if last else ""),
                *((str(found.rounds), f"{float(found.traffic):.3g}") if found else ("", "")),
                f"{formula.rounds}, {float(formula.traffic):.3g}" if formula else "",
                "NO" if wrong else "yes" if proved else "",
                style="bold red" if wrong else "",
            )
        table.add_section()
    print_once(table, Text(LEGEND), *(Text(problem, "bold red") for problem in problems))
    return 1 if problems else 0


def _prove(
    operation: str, algorithm: str, sizes: Iterable[int], limit: int
) -> tuple[list[int], list[str], str, Cost | None, Cost | None]:
    """(numbers of ranks for which the algorithm is proved, errors, the last case, its cost, its formula)."""
    build = BUILDERS[operation][algorithm]
    proved: list[int] = []
    wrong: list[str] = []
    last = ""
    found = formula = None
    for size in sizes:
        if size * build(Setup(size)).cost.rounds > limit:
            continue
        before = len(wrong)
        for setup in setups(operation, algorithm, size):
            schedule = build(setup)
            last, found, formula = _shown(setup, operation, algorithm), None, schedule.cost
            try:
                found = check(schedule)
            except ScheduleError as error:
                wrong.append(f"{operation} {algorithm}, {', '.join(filter(None, (f'{size} ranks', last)))}: {error}")
        if len(wrong) == before:
            proved.append(size)
    return proved, wrong, last, found, formula


def _shown(setup: Setup, operation: str, algorithm: str) -> str:
    """The root, node size and number of segments of this case, if the operation or algorithm uses them."""
    return ", ".join(
        [f"root {setup.root}"] * (operation in ROOTED)
        + [f"{setup.per_node} a node"] * (algorithm in TWO_LEVEL)
        + [f"{setup.num_segments} segment" + "s" * (setup.num_segments > 1)] * (algorithm in PIPELINED)
    )
