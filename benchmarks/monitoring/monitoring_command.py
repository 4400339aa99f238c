"""`python -m mpitrain bench monitoring`."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.monitoring import pages, sinks
from collectives.shared.arguments import names_of
from collectives.shared.tables import markdown_table
from collectives.shared.terminal import positive


def main(words: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain bench monitoring",
        description="Time a step in each sink and in torch's writer of event files, in turn; then time report and watch on records of "
        "several sizes. One process, without mpirun.",
    )
    parser.add_argument("--only", type=names_of(["sinks", "pages"]), metavar="PART,..", default=["sinks", "pages"],
                        help="sinks, pages")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=400, help="steps of a sink's turn (default: %(default)s)")
    parser.add_argument("--most-steps", type=positive, help="leave out records with more steps")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="mpitrain-monitoring.") as room:
        if "sinks" in given.only:
            _print_sinks(sinks.measured(Path(room), rounds=given.rounds, steps=given.steps))
        if "pages" in given.only:
            sizes = [each for each in pages.SIZES if given.most_steps is None or each[1] <= given.most_steps]
            _print_pages(list(pages.measured(Path(room), rounds=given.rounds, sizes=sizes)))
    return 0


def _print_sinks(found: dict[tuple[str, bool], float]) -> None:
    rows = [
        [name, f"{found[name, True]:.0f} us", f"{found[name, False]:.0f} us"]
        for name in dict.fromkeys(n for n, _ in found)
    ]
    print(markdown_table(["a step of 15 figures", "with empty caches", "in a loop"], rows))


def _print_pages(found: Sequence[pages.Shown]) -> None:
    rows = [
        [
            f"{each.ranks:,}",
            f"{each.steps:,}",
            f"{each.report_s:.2f} s",
            f"{each.report_bytes / 1e6:.2f} MB",
            f"{each.watch_s:.2f} s",
        ]
        for each in found
    ]
    print(markdown_table(["ranks", "steps", "report", "its page", "watch --once"], rows))
