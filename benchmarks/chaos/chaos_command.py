"""`python -m mpitrain chaos`: harms real jobs at random moments, and counts how many do what is expected."""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from benchmarks.chaos import table
from benchmarks.chaos.cases import BY_NAME, CASES, Case
from benchmarks.chaos.disk import small_disk
from benchmarks.chaos.trial import attempt, losses_of
from benchmarks.chaos.verdicts import Outcome
from mpitrain.tools.bench.jobs import checkout

References = dict[tuple[tuple[str, ...], tuple[str, ...]], Mapping[int, float]]
"""The losses of undisturbed runs, by the command and the settings: several cases may share one."""


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 if all have."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain chaos",
        description="Harm real jobs at random moments, and count how many do what is expected. Run it in a checkout, without mpirun.",
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
    checkout.check("chaos")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running job is ended
    references: References = {}
    outcomes = [
        outcome
        for name in options.cases or BY_NAME
        for outcome in _trials(BY_NAME[name], options.trials, options.seed, options.results, references)
    ]
    print(table.markdown(outcomes))
    too_few = len(outcomes) < options.trials * len(options.cases or BY_NAME)
    if too_few:
        print("chaos: too many harms came too late, so that trials are missing")
    return int(too_few or not all(outcome.ok for outcome in outcomes))


def _trials(case: Case, num: int, seed: int, results: Path | None, references: References) -> list[Outcome]:
    room = Path(tempfile.mkdtemp(prefix="mpitrain-chaos."))
    with small_disk(room / "disk", case.disk_bytes) if case.disk_bytes else nullcontext():
        outcomes = _in(room, case, num, seed, results, references)
    if all(outcome.ok for outcome in outcomes):
        shutil.rmtree(room, ignore_errors=True)
    return outcomes


def _in(room: Path, case: Case, num: int, seed: int, results: Path | None, references: References) -> list[Outcome]:
    name = case.name
    command, env = case.launch()
    reference: Mapping[int, float] = {}
    if case.needs_reference:
        if (command, case.settings) not in references:
            references[command, case.settings] = losses_of(case, command, env, room)
        reference = references[command, case.settings]
    outcomes: list[Outcome] = []
    seeds = (random.Random(f"{seed}/{name}/{number}").randrange(1 << 31) for number in range(3 * num))
    for its_seed in seeds:  # more than `num`, because some come after the last step
        if len(outcomes) == num:
            break
        if (outcome := attempt(case, its_seed, command, env, reference, room)) is None:
            print(f"{name}: seed {its_seed} came too late, and another follows", flush=True)
            continue
        outcomes.append(outcome)
        problem = f"  {outcome.problem} (see {room})" if outcome.problem else ""
        print(f"{name} {len(outcomes)}/{num}: {table.shown(outcome)}{problem}", flush=True)
        if results is not None:
            with results.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
    return outcomes
