"""`gc DIR`: removes files of dead jobs; with options also old and incomplete checkpoints; never files of live jobs or the newest."""

import argparse
import os
from contextlib import suppress
from typing import NamedTuple

from rich.text import Text

from ckpt.commands.terminal import (
    Commands,
    UsageError,
    add_json,
    local,
    new_table,
    print_json,
    print_table,
    printable,
    size_text,
)
from ckpt.commit.atomic import mend_latest
from ckpt.commit.leftovers import leftovers, settle
from ckpt.commit.retention import outdated, remove
from ckpt.format.manifest import FILE_NAME
from ckpt.storage.catalog import folder_of_checkpoints, latest, list_checkpoints, reason_to_keep
from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import Place
from collectives.shared.terminal import positive


class _CleanupStep(NamedTuple):
    """`action`: "remove", "restore" or "keep"."""

    action: str
    path: Place
    nbytes: int
    why: str


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("gc", help="remove files of dead jobs; on request old or incomplete checkpoints")
    parser.add_argument("dir", metavar="DIR", type=local, help="a run, or a folder of checkpoints")
    parser.add_argument(
        "--keep",
        type=positive,
        metavar="K",
        help="remove checkpoints older than the newest K complete ones; only names that end with a step count and are removed",
    )
    parser.add_argument(
        "--keep-every", type=positive, metavar="M", help="with --keep: also keep steps that are multiples of M"
    )
    parser.add_argument("--incomplete", action="store_true", help="remove checkpoints with missing or altered files")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.keep_every is not None and args.keep is None:
        raise UsageError("--keep-every chooses old checkpoints that stay: it needs --keep K")
    if (args.dir / FILE_NAME).exists():
        raise UsageError(f"{args.dir} is a checkpoint; gc takes the folder that it lies in")
    # Absolute, because a parent "." would have no name.
    folder = LocalPath(folder_of_checkpoints(args.dir)).abspath()
    steps = _clean(folder, dry=args.dry_run)
    steps += _thin(folder, args)
    if args.json:
        shown = [{"action": s.action, "path": str(s.path), "bytes": s.nbytes, "why": s.why} for s in steps]
        print_json({"folder": str(folder), "dry_run": args.dry_run, "steps": shown})
    else:
        _print(steps, dry=args.dry_run)
    if not args.dry_run:
        stuck = [str(left.path) for left in leftovers(folder) if left.action == "remove"]
        if stuck:
            raise UsageError(f"could not be removed, or not all of it: {', '.join(map(printable, stuck))}")


def _clean(folder: LocalPath, *, dry: bool) -> list[_CleanupStep]:
    """Carry out the actions for the folders of dead jobs."""
    steps = []
    for left in leftovers(folder):
        step = _CleanupStep(left.action, left.path, _bytes(left.path), left.why)
        if not dry:
            settle(left)
            if left.action == "remove" and os.path.lexists(left.path):
                step = step._replace(action="keep", why=f"{left.why}, but cannot be removed")
        steps.append(step)
    return steps


def _thin(folder: LocalPath, args: argparse.Namespace) -> list[_CleanupStep]:
    """Remove incomplete and old checkpoints, if the options say so."""
    steps = _incomplete(folder) if args.incomplete else []
    newest = latest(folder)
    if args.keep is not None and newest is not None:
        beyond = "the newest one" if args.keep == 1 else f"the newest {args.keep}"
        known = {step.path for step in steps}
        for path in reversed(outdated(newest, args.keep, args.keep_every)):
            if path not in known:
                reason = reason_to_keep(path)
                why = f"older than {beyond}" + (f", but {reason}" if reason else "")
                steps.append(_CleanupStep("keep" if reason else "remove", path, _bytes(path), why))
    for step in steps:
        if step.action == "remove" and not args.dry_run:
            with suppress(FileNotFoundError):  # another job has removed it
                remove(step.path)
    if not args.dry_run and any(step.action == "remove" for step in steps):
        mend_latest(folder)
    return steps


def _incomplete(folder: LocalPath) -> list[_CleanupStep]:
    steps = []
    for found in list_checkpoints(folder):
        if found.problem is None or found.path.name.startswith("."):
            continue
        if not found.broken:
            steps.append(_CleanupStep("keep", found.path, found.nbytes, f"may be whole: {found.problem}"))
        elif reason := reason_to_keep(found.path):
            # It may be a user's folder that has a file with one of our names.
            steps.append(_CleanupStep("keep", found.path, found.nbytes, reason))
        else:
            steps.append(_CleanupStep("remove", found.path, found.nbytes, found.problem))
    return steps


def _print(steps: list[_CleanupStep], *, dry: bool) -> None:
    done = {"remove": "removed", "restore": "restored", "keep": "kept"}
    if steps:
        table = new_table("NAME", "ACTION", "SIZE>", "WHY")
        for step in steps:
            action = f"would {step.action}" if dry else done[step.action]
            table.add_row(Text(printable(step.path.name)), action, size_text(step.nbytes), Text(step.why))
        print_table(table)
    removed = [step.nbytes for step in steps if step.action == "remove"]
    if not removed:
        print("nothing to remove")
    else:
        print(f"{'would free' if dry else 'freed'} {size_text(sum(removed))}")


def _bytes(path: Place) -> int:
    try:
        return 0 if os.path.islink(path) else path.nbytes()
    except OSError:  # removed, or not readable
        return 0
