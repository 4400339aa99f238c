"""`python -m mpitrain diff A B`: see `main`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt.commands.terminal import add_json, print_json
from ckpt.format.manifest import FILE_NAME, CheckpointError
from ckpt.reading.checkpoint import open_checkpoint
from ckpt.storage.places import Place, place_of
from ckpt.storage.remote import Url
from collectives.commands.closed_pipe import ends_with_its_reader
from collectives.texts import shown as shown_text
from collectives.texts import without_secrets
from mpitrain.job.record import conditions
from mpitrain.job.record.parsing.words import counted
from mpitrain.view.diff import checkpoints, metrics
from mpitrain.view.diff import printing as shown
from mpitrain.view.diff.checkpoints import CheckpointDifference
from mpitrain.view.diff.metrics import MetricsDifference
from mpitrain.view.diff.starts import of_run
from mpitrain.view.reading.run import RunRecord, read_run
from mpitrain.view.report.summary import heading

BAD_INPUT = 2
"""The exit code. As in GNU diff, 1 is an answer."""


def main(words: Sequence[str]) -> int:
    """Compare two runs or two checkpoints; returns the exit code: 0 for the same bits, 1 for a difference, 2 for bad input."""
    options = _parser().parse_args(words)
    try:
        with ends_with_its_reader():
            return _compare(options)
    except (ValueError, OSError, CheckpointError) as error:
        sys.stdout.flush()
        print(f"mpitrain: error: diff: {shown_text(without_secrets(str(error)))}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain diff",
        description="Compares two runs, or two checkpoints, bit for bit: the metrics of each step, except for times and memory, and "
        "the checkpoints that both runs have, up to the first that differs. The numbers of ranks may differ. It needs neither MPI nor "
        "torch.",
        epilog="Exit code: 0: the same bits; 1: something differs, or one run has more steps; 2: the input cannot be compared.",
    )
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help="the folder of a run; or a checkpoint, also as a URL")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="compare only metrics and tensors with these names, such as loss or 'model/*', also metrics of your own; may be repeated",
    )
    parser.add_argument("--common", action="store_true", help="steps that only one run has are no difference")
    add_json(parser)
    return parser


def _compare(options: argparse.Namespace) -> int:
    a, b = place_of(options.a), place_of(options.b)
    is_checkpoint = {place: (place / FILE_NAME).exists() for place in (a, b)}
    if all(is_checkpoint.values()):
        return _compare_checkpoints(a, b, options)
    if any(is_checkpoint.values()):
        one, other = sorted((a, b), key=lambda place: is_checkpoint[place], reverse=True)
        raise ValueError(f"{one} is a checkpoint, and {other} is none; expected two runs or two checkpoints")
    return _compare_runs(_run(a), _run(b), options)


def _run(place: Place) -> RunRecord:
    if isinstance(place, Url):
        raise ValueError(
            f"{place} is no checkpoint; expected a local folder of a run, or the path or URL of a checkpoint"
        )
    try:
        return read_run(Path(place))
    except ValueError as error:
        raise ValueError(f"{error}, or a checkpoint") from None


def _compare_checkpoints(a: Place, b: Place, options: argparse.Namespace) -> int:
    opened = {"A": open_checkpoint(a), "B": open_checkpoint(b)}
    found = checkpoints.compare(opened["A"], opened["B"], options.only)
    if options.only and not found.num_seen:
        raise _nothing(options.only)
    if options.json:
        print_json(_to_dict(found))
    out = shown.reporter(quiet=options.json)
    shown.say(out, *(f"{side}  {each.path}: {checkpoints.heading(each)}" for side, each in opened.items()))
    shown.print_conditions(out, found.conditions)
    shown.print_checkpoint(out, found)
    if found:
        shown.say(out, shown.verdict_of_checkpoint(found))
    return int(bool(found))


def _compare_runs(a: RunRecord, b: RunRecord, options: argparse.Namespace) -> int:
    report = shown.reporter(quiet=options.json)
    differing = conditions.differing(of_run(a), of_run(b))
    of_steps = metrics.compare(a, b, options.only)
    for side, run in (("A", a), ("B", b)):
        shown.say(report, f"{side}  {run.folder}: {heading(run)}", *(f"{side}  {note}" for note in run.notes))
    shown.print_conditions(report, differing)
    shown.print_metrics(report, of_steps)
    compared, not_compared = checkpoints.compare_runs(a.folder, b.folder, options.only)
    for found in compared:
        shown.print_checkpoint(report, found)
    if not checkpoints.common_names(a.folder, b.folder):
        shown.say(report, "checkpoints: the runs have none of the same name")
    if not_compared:
        shown.say(report, f"later checkpoints, not compared: {', '.join(not_compared)}")
    if compared:
        shown.print_algorithms(report, compared[-1].conditions)

    if not of_steps.metrics and not any(each.num_seen for each in compared):
        if options.only:
            raise _nothing(options.only)
        raise ValueError(
            f"{a.folder} and {b.folder} have no step and no checkpoint in common, so there is nothing to compare"
        )
    differences = shown.verdicts(of_steps, compared)
    is_same = not differences
    verdicts = differences or [_same(of_steps, compared)]
    is_of_tensors = options.only and not of_steps.metrics
    is_whole = options.common or is_of_tensors or not (of_steps.only_a or of_steps.only_b)
    if options.json:
        print_json(
            {
                "a": str(a.folder),
                "b": str(b.folder),
                "same": is_same and is_whole,
                "verdict": verdicts,
                "conditions": [each._asdict() for each in differing],
                "notes": {"a": a.notes, "b": b.notes},
                **of_steps._asdict(),
                "metrics": [each._asdict() for each in of_steps.metrics],
                "checkpoints": list(map(_to_dict, compared)),
                "not_compared": not_compared,
            }
        )
    shown.say(report, *verdicts)
    if is_same and not is_whole:
        shown.say(report, _why_not_whole(of_steps, a, b))
    return 0 if is_same and is_whole else 1


def _same(of_steps: MetricsDifference, compared: Sequence[CheckpointDifference]) -> str:
    parts = []
    if of_steps.metrics:
        parts.append(f"{counted(len(of_steps.metrics), 'metric')} of {counted(of_steps.num_steps, 'step')}")
    if compared:
        parts.append(f"the tensors of {counted(len(compared), 'checkpoint')}")
    return f"the same bits: {', and '.join(parts)}"


def _why_not_whole(of_steps: MetricsDifference, a: RunRecord, b: RunRecord) -> str:
    for run, others in ((a, of_steps.only_b), (b, of_steps.only_a)):
        if others and not len(run.steps):
            return f"but no step was compared, because {run.folder}/metrics.jsonl has none; with --common this is no difference"
    return "but one run has more steps; with --common this is no difference"


def _nothing(only: Sequence[str]) -> ValueError:
    return ValueError(f"--only: neither has a metric or a tensor called {' or '.join(map(repr, only))}")


def _to_dict(found: CheckpointDifference) -> dict[str, Any]:
    return found._asdict() | {
        "same": not found,
        "conditions": [each._asdict() for each in found.conditions],
        "tensors": [each._asdict() for each in found.tensors],
        "meta": [each._asdict() for each in found.meta],
    }
