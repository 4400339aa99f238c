"""`python -m mpitrain chaos`: harms real jobs at random moments, and counts how many go on."""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mpitrain.chaos import checkout, table
from mpitrain.chaos.cases import BY_NAME, CASES
from mpitrain.chaos.trial import Outcome, attempt, losses_of


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 if all trials have gone on."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain chaos",
        description="Harm real jobs at random moments, and count how many go on. Run it in a checkout, without mpirun.",
        epilog="cases: " + "; ".join(f"{case.name} ({case.words})" for case in CASES),
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the cases (default: all)")
    parser.add_argument("--trials", type=int, default=3, help="trials of each case (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and victims (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="append each outcome to FILE, one JSON object a line"
    )
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="FILE", help="print the table of such files, and do nothing else"
    )
    options = parser.parse_args(words)
    if options.table:
        print(table.markdown([outcome for file in options.table for outcome in table.read(file)]))
        return 0
    if unknown := [name for name in options.cases if name not in BY_NAME]:
        parser.error(f"there is no case {unknown[0]!r}; expected {', '.join(BY_NAME)}")
    checkout.check()
    outcomes = [
        outcome
        for name in options.cases or BY_NAME
        for outcome in _trials(name, options.trials, options.seed, options.results)
    ]
    print(table.markdown(outcomes))
    return int(not all(outcome.ok for outcome in outcomes))


def _trials(name: str, num: int, seed: int, results: Path | None) -> list[Outcome]:
    case = BY_NAME[name]
    command, env = case.launch()
    room = Path(tempfile.mkdtemp(prefix="mpitrain-chaos."))
    reference = losses_of(command, env, case.settings, room / "undisturbed")
    outcomes = []
    for number in range(num):
        outcome = attempt(
            name, random.Random(f"{seed}/{name}/{number}").randrange(1 << 31), command, env, case.settings, case.harm,
            reference, room / "run", max_repeated=case.max_repeated,
        )  # fmt: skip
        outcomes.append(outcome)
        problem = f"  {outcome.problem} (see {room})" if outcome.problem else ""
        print(f"{name} {number + 1}/{num}: {table.shown(outcome)}{problem}", flush=True)
        if results is not None:
            with results.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
    return outcomes
