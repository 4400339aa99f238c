"""`python -m mpitrain bench bits`."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from collectives.shared.arguments import names_of, positive_seconds
from collectives.shared.tables import markdown_table, plural
from collectives.shared.terminal import positive
from mpitrain.tools.bench.bits.cases import CASES, HOSTS, KILLED, MODELS, RESUMED, SETTINGS
from mpitrain.tools.bench.bits.runs import FailedError, difference, launch, train
from mpitrain.tools.bench.jobs import checkout
from mpitrain.tools.bench.jobs.job import OwnHarm
from mpitrain.tools.bench.options import Parser

SAME, FAILED = "the same bits", "failed:"
_LEAST_STEPS = 4  # for a kill between two steps that have copies


class _Planned(NamedTuple):
    """A run that is compared. It begins after the step `after`. `saves`: later runs begin with its checkpoints."""

    case: str
    model: str
    ranks: int
    settings: tuple[str, ...]
    after: int = 0
    saves: bool = False

    def __str__(self) -> str:
        after = f" after step {self.after}" * (self.after > 0)
        return f"{self.case}{after}, {self.model}, {plural(self.ranks, 'rank')}"


class _Outcome(NamedTuple):
    """A line of the file of figures. `result`: SAME, or what differs or has failed."""

    case: str
    model: str
    ranks: int
    after: int
    steps: int
    seconds: float | None
    result: str


def main(words: Sequence[str]) -> int:
    """Train, compare and print; returns the exit code: 1 if a run has other bits, 2 if a job failed. ValueError for wrong arguments."""
    options = _parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running job is ended
    room = Path(tempfile.mkdtemp(prefix="mpitrain-bits.", dir=options.folder))
    outcomes: list[_Outcome] = []
    try:
        for planned in _plan(options, room):
            outcomes.append(_outcome(planned, options, room))
            print(f"{planned}: {outcomes[-1].result}", flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(outcomes[-1]._asdict()) + "\n")
    except FailedError as error:  # without the run on one rank there is nothing to compare with
        print(f"mpitrain: error: bench bits: the run on one rank {FAILED} {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(room, ignore_errors=True)
        raise
    print(table(outcomes))
    num_same = sum(outcome.result == SAME for outcome in outcomes)
    print(f"{SAME} as on one rank: {num_same} of {plural(len(outcomes), 'run')} of {plural(options.steps, 'step')}")
    if num_same < len(outcomes):
        print(f"the runs are in {room}; compare them by python -m mpitrain diff A B")
        return 2 if any(outcome.result.startswith(FAILED) for outcome in outcomes) else 1
    shutil.rmtree(room, ignore_errors=True)
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m mpitrain bench bits",
        description="Trains small models with slices on other ranks and in other layouts, and compares losses, gradient norms, "
        "weights and the optimizer's state with a run on one rank, bit for bit. Run it without mpirun: it starts its jobs itself, in a "
        "checkout by the mpirun that ./mpirun/setup has chosen. All cases take about 4 minutes on two cores.",
        epilog="\n".join(["cases, on the numbers of ranks:"] + [
            f"  {name:<11} {','.join(map(str, case.ranks)):<8} {case.words}" for name, case in CASES.items()
        ]),
    )  # fmt: skip
    parser.add_argument(
        "--cases", type=names_of(list(CASES), or_all=True), metavar="NAME,..",
        help=f"names of the list below, or all (default: all but {HOSTS}, which needs the right to make namespaces; with --launcher "
        f"also without {KILLED}, which then needs an mpirun --with-ft ulfm)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=_numbers, metavar="N,..",
        help="train on these numbers of ranks instead, in each case whose layout fits them",
    )  # fmt: skip
    parser.add_argument(
        "--models", type=names_of(list(MODELS)), metavar="NAME,..",
        help=f"train these models instead, in each case: {', '.join(MODELS)}",
    )  # fmt: skip
    parser.add_argument("--steps", type=positive, default=50, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--stops", type=_numbers, metavar="STEP,..",
        help=f"the steps after which case {RESUMED} stops (default: 1, 2, 3, the middle, and the last but one)",
    )  # fmt: skip
    parser.add_argument(
        "--settings", type=str.split, default=[], metavar="TEXT",
        help="further settings of all runs in one text, such as '--model.width 768 --data.path corpus.txt'",
    )  # fmt: skip
    parser.add_argument(
        "--launcher", type=str.split, default=[], metavar="TEXT",
        help="what starts a job, instead of the checkout's mpirun, such as 'mpirun -H a:4,b:4' or srun; -n N is added",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each run to FILE, one JSON object a line")
    parser.add_argument(
        "--timeout", type=positive_seconds, default=600.0, metavar="SECONDS", help="of a run (default: %(default)g)"
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="where the runs are; all hosts must see it (default: the folder of temporary files)"
    )  # fmt: skip
    options = parser.parse_args(words)
    if options.cases is None:
        options.cases = [name for name in CASES if name != HOSTS and not (name == KILLED and options.launcher)]
    if options.steps < _LEAST_STEPS:
        parser.error(f"--steps: expected at least {_LEAST_STEPS}, got {options.steps}")
    last = options.steps - 1
    options.stops = options.stops or sorted({1, 2, 3, options.steps // 2, last})
    if max(options.stops) > last:
        parser.error(f"--stops: expected steps from 1 to {last}, got {max(options.stops)}")
    if not list(_plan(options, Path())):
        needs = ", ".join(f"{name} needs a multiple of {CASES[name].multiple}" for name in options.cases)
        parser.error(f"--ranks: no case fits {', '.join(map(str, options.ranks))}: {needs}")
    if HOSTS in options.cases or not options.launcher:
        checkout.check("bench bits")
    if options.launcher and not shutil.which(options.launcher[0]):
        parser.error(f"--launcher: there is no command {options.launcher[0]!r}")
    for name, folder in (("--folder", options.folder), ("--json", options.json and options.json.parent)):
        if folder is not None and not Path(folder).is_dir():
            parser.error(f"{name}: there is no folder {folder}")
    return options


def _numbers(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def _plan(options: argparse.Namespace, room: Path) -> Iterator[_Planned]:
    for name in options.cases:
        case = CASES[name]
        fits = [n for n in options.ranks or case.ranks if n % case.multiple == 0 and n > (name == KILLED)]
        settings = tuple(case.settings.split())
        for model in (options.models or case.models) if fits else ():
            if name == RESUMED:
                keep = ("--checkpoint.every", "1", "--checkpoint.keep", str(options.steps))
                saving = _Planned(name, model, fits[0], (*settings, *keep), saves=True)
                yield saving
                for stop, ranks in zip(options.stops, cycle(fits[1:] or fits), strict=False):
                    checkpoint = _folder(saving, room) / f"checkpoints/step-{stop:08d}"
                    yield _Planned(name, model, ranks, (*settings, "--resume", str(checkpoint)), stop)
            else:
                every = ("--train.copy-every", str(max(options.steps // 6, 1))) if name == KILLED else ()
                yield from (_Planned(name, model, ranks, (*settings, *every)) for ranks in fits)


def _folder(planned: _Planned, room: Path) -> Path:
    return room / f"{planned.case}-{planned.model}-{planned.ranks}-after-{planned.after}"


def _outcome(planned: _Planned, options: argparse.Namespace, room: Path) -> _Outcome:
    """Train a run, and before it the model's run on one rank if there is none; and compare them."""
    common = (*SETTINGS, *MODELS[planned.model].split(), "--train.steps", str(options.steps))
    common += ("--train.eval-every", str(options.steps // 2), *options.settings)
    reference, run = room / f"{planned.model}-1", _folder(planned, room)
    if not reference.exists():
        train(reference, launch(1, launcher=options.launcher), common, options.timeout, None)
    is_killed = planned.case == KILLED
    started_by = launch(planned.ranks, launcher=options.launcher, hosts=1 + (planned.case == HOSTS), elastic=is_killed)
    kill = OwnHarm("kill", planned.ranks - 1, options.steps // 2 + 1, 0) if is_killed else None
    seconds = None
    try:
        seconds = round(train(run, started_by, (*common, *planned.settings), options.timeout, kill), 2)
        result = difference(reference, run, first=planned.after + 1, last=options.steps) or SAME
    except FailedError as error:
        result = f"{FAILED} {error}"
    if result == SAME and not planned.saves:
        shutil.rmtree(run, ignore_errors=True)
    return _Outcome(planned.case, planned.model, planned.ranks, planned.after, options.steps, seconds, result)


def table(outcomes: Sequence[_Outcome]) -> str:
    """A line for each case and model, and one for each run that has other bits, as Markdown."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for each in outcomes:
        words = CASES[each.case].words if each.case != RESUMED else "resumed"
        lines.setdefault((words, each.model, each.result), []).append(_ranks(each))
    return markdown_table(
        ("case", "model", "ranks", "result"),
        [(words, model, ", ".join(ranks), result) for (words, model, result), ranks in lines.items()],
    )


def _ranks(outcome: _Outcome) -> str:
    return f"{outcome.ranks} after step {outcome.after}" if outcome.after else str(outcome.ranks)
