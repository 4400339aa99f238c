"""`ls DIR`: lists the checkpoints in a folder."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.text import Text

from ckpt.commands.terminal import (
    Commands,
    add_json,
    age_text,
    new_table,
    place,
    print_json,
    print_table,
    printable,
    size_text,
)
from ckpt.format.manifest import FILE_NAME
from ckpt.storage.catalog import RUN_SUBFOLDER, CheckpointInfo, info, list_checkpoints
from ckpt.storage.places import Place, absolute


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("ls", help="list the checkpoints in a folder: step, size, age, complete or not")
    parser.add_argument(
        "dir", metavar="DIR", type=place, help="a run, a folder of checkpoints, or one checkpoint; or a URL"
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    folder: Place = args.dir
    found = [info(folder, absolute(folder).name)] if (folder / FILE_NAME).exists() else list_checkpoints(folder)
    if not found:
        print(f"no checkpoints in {folder}{_below(folder)}", file=sys.stderr)
    if args.json:
        print_json([_json(c) for c in found])
        return
    table = new_table("NAME", "STEP>", "TENSORS>", "SIZE>", "AGE>", "STATE")
    table.columns[0].no_wrap = True
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    for c in found:
        state = Text("complete", "green") if c.problem is None else Text(f"incomplete: {c.problem}", "red")
        age = None if c.saved is None else age_text(time.time() - c.saved)
        cells = [c.step, c.num_tensors, size_text(c.nbytes), age]
        table.add_row(Text(printable(c.name)), *("" if cell is None else str(cell) for cell in cells), state)
    print_table(table)


def _below(folder: Place) -> str:
    """Where there are some, if `folder` holds runs."""
    if not isinstance(folder, Path):
        return ""
    # os.path: a folder of others that cannot be looked into is none. Path.is_dir raises PermissionError.
    run = min((run for run in folder.iterdir() if os.path.isdir(run / RUN_SUBFOLDER)), default=None)
    return "" if run is None else f": name one of the runs in it, such as {printable(str(run))}"


def _json(c: CheckpointInfo) -> dict[str, Any]:
    return {
        "name": c.name,
        "path": str(c.path),
        "step": c.step,
        "complete": c.complete,
        "problem": c.problem,
        "bytes": c.nbytes,
        "tensors": c.num_tensors,
        "saved": c.saved,
    }
