"""`verify DIR`: compares every byte of a checkpoint with its checksums."""

import argparse

from ckpt.check.inspecting import need_folder
from ckpt.check.verifying import verify
from ckpt.commands.terminal import (
    Commands,
    UsageError,
    add_checkpoint,
    add_json,
    print_json,
    printable,
    shown_progress,
    size_text,
    told_in_a_line,
)
from ckpt.format.manifest import CheckpointError
from ckpt.storage.catalog import find, info, is_part, list_checkpoints
from ckpt.storage.checksums import Damage
from ckpt.storage.places import Place


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser(
        "verify", help="compare every byte of a checkpoint with its checksums; exit code 1 if it is damaged"
    )
    add_checkpoint(parser)
    parser.add_argument("--all", action="store_true", help="verify all checkpoints of the run or the folder")
    parser.add_argument(
        "--hdf5",
        action="store_true",
        help="also open the files with HDF5, in a child process, to find problems for other tools",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.hdf5:
        with told_in_a_line():
            need_folder(args.dir)
    if args.all:
        paths = [found.path for found in list_checkpoints(args.dir)]
        if not paths:
            raise UsageError(f"no checkpoints in {args.dir}")
    else:
        # A checkpoint that has lost its manifest is damaged, but `find` ignores it.
        has_parts = args.dir.is_dir() and any(map(is_part, args.dir.names()))
        paths = [args.dir if has_parts else find(args.dir)]
    reports = []
    for path in paths:
        nbytes = info(path, path.name).nbytes
        problem, found = _verify(path, nbytes, hdf5=args.hdf5)
        reports.append({"path": str(path), "problem": problem, "damage": [damage._asdict() for damage in found]})
        if args.json:
            continue
        if problem is None and not found:
            print(f"{printable(str(path))}: whole, {size_text(nbytes)}", flush=True)
        for line in [problem] if problem else [f"{printable(str(path))}: {damage}" for damage in found]:
            print(line, flush=True)
    if args.json:
        print_json(reports)
    return int(any(report["problem"] or report["damage"] for report in reports))


def _verify(path: Place, nbytes: int, *, hdf5: bool) -> tuple[str | None, list[Damage]]:
    """The reason why its files cannot be verified, or None; and the damage."""
    with shown_progress("verifying", nbytes) as progress:
        try:
            return None, verify(path, hdf5=hdf5, progress=progress)
        except CheckpointError as error:
            return str(error), []
