"""`python -m mpitrain bench recovery`."""

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.recovery.contestants import NAMES, SIZES, TORCHFT, TORCHRUN
from benchmarks.recovery.trial import TrialError, trial
from collectives.bench.kit.turns import drawn_order
from collectives.shared.arguments import names_of
from collectives.shared.tables import markdown_table
from collectives.shared.terminal import positive
from mpitrain.tools.bench.jobs import checkout


def main(words: Sequence[str]) -> int:
    """Measure and print; returns the exit code: 1 if a contestant did not recover."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain bench recovery",
        description="Kill a rank of our jobs and of torchrun's, in turn, and time the next step. Run it in a checkout, without mpirun.",
        epilog="; ".join(f"{name}: {text}" for name, text in NAMES.items()),
    )
    parser.add_argument(
        "--only", type=names_of(list(NAMES)), default=list(NAMES), metavar="NAME,..", help="contestants"
    )
    parser.add_argument(
        "--sizes", type=names_of(list(SIZES)), default=list(SIZES), metavar="SIZE,..", help="tiny, 101m"
    )
    parser.add_argument("--trials", type=positive, default=3, help="kills of each contestant (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each trial to FILE, one JSON object a line")
    parser.add_argument(
        "--folder", default="/dev/shm", help="where the runs and checkpoints are (default: %(default)s)"
    )
    given = parser.parse_args(words)
    checkout.check("bench recovery")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running job is ended
    has_torchft = importlib.util.find_spec("torchft") is not None
    names = [name for name in given.only if name != TORCHFT or has_torchft]
    rows: list[dict[str, Any]] = []
    failed = False
    with tempfile.TemporaryDirectory(prefix="mpitrain-recovery.", dir=given.folder) as room:
        for size in given.sizes:
            for number in range(given.trials):
                for i in drawn_order(number, len(names)):
                    name = names[i]
                    try:
                        figures = trial(name, SIZES[size], Path(room, "run"))
                    except TrialError as error:
                        failed = True
                        print(f"{size} {name}: {error}", file=sys.stderr, flush=True)
                        continue
                    rows.append({"size": size, "name": name, "trial": number, **figures})
                    print(
                        f"{size} {name} {number + 1}/{given.trials}: next step after {figures['next_s']:.2f} s",
                        flush=True,
                    )
                    if given.json:
                        with given.json.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    if TORCHFT in given.only and not has_torchft:
        print("torchft is not installed, so it has no row: pip install torchft-nightly")
    return int(failed)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, ratios of medians to torchrun's, and ranges, as Markdown."""
    lines = []
    for size in dict.fromkeys(row["size"] for row in rows):
        its = {name: [row for row in rows if (row["size"], row["name"]) == (size, name)] for name in NAMES}
        peer = median(row["next_s"] for row in its[TORCHRUN]) if its[TORCHRUN] else None
        for name, trials in its.items():
            if trials:
                seconds = [row["next_s"] for row in trials]
                ratio = "" if peer is None else f"{median(seconds) / peer:.2f}"
                again = f"{median(row['caught_up_s'] for row in trials):.2f}"
                spread = f"{min(seconds):.2f} .. {max(seconds):.2f}"
                lines.append((f"{size}, {name}", f"{median(seconds):.2f}", ratio, spread, again, str(len(trials))))
    headings = ("", "next step s", "to torchrun's", "range s", "step of the kill again s", "trials")
    return markdown_table(headings, lines)
