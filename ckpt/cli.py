"""`python -m ckpt ls DIR` and `python -m ckpt show DIR [TENSOR]`: look at checkpoints without MPI and torch."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckpt.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from ckpt.folder import CheckpointInfo, find, info, list_checkpoints
from ckpt.layout import Box
from ckpt.manifest import FILE_NAME, CheckpointError

_PREVIEW = 6  # values along each of the last two dimensions
_META_WIDTH = 200  # characters of a value of the meta; --json prints all


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 1 after one line about what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m ckpt", description="Look at checkpoints; needs neither MPI nor torch."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    ls = commands.add_parser("ls", help="the checkpoints in a folder: step, size, age, complete or not")
    ls.add_argument("dir", metavar="DIR", type=Path, help="a run, a folder of checkpoints, or one checkpoint")
    ls.set_defaults(run=lambda args: _ls(args.dir, args.json))
    show = commands.add_parser("show", help="what one checkpoint holds, or one tensor of it")
    show.add_argument(
        "dir", metavar="DIR", type=Path, help="a checkpoint; or a run or a folder of them: the newest complete one"
    )
    show.add_argument("tensor", metavar="TENSOR", nargs="?", help="the name of a tensor: its blocks and first values")
    show.set_defaults(run=lambda args: _show(args.dir, args.tensor, args.json))
    for command in (ls, show):
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not try to flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (CheckpointError, OSError) as error:
        print(f"ckpt: {error}", file=sys.stderr)
        return 1
    return 0


def _ls(folder: Path, as_json: bool) -> None:
    found = [info(folder, folder.absolute().name)] if (folder / FILE_NAME).exists() else list_checkpoints(folder)
    if as_json:
        _print_json([_info_json(c) for c in found])
        return
    table = Table(box=None, header_style="bold")
    for column, justify in (
        ("NAME", "left"),
        ("STEP", "right"),
        ("TENSORS", "right"),
        ("SIZE", "right"),
        ("AGE", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("STATE", overflow="fold")
    for c in found:
        state = Text("complete", "green") if c.problem is None else Text(f"incomplete: {c.problem}", "red")
        cells = [c.step, c.num_tensors, _size(c.nbytes), None if c.saved is None else _age(time.time() - c.saved)]
        table.add_row(Text(c.name), *("" if cell is None else str(cell) for cell in cells), state)
    _print_table(table)
    if not found:
        print(f"no checkpoints in {folder}", file=sys.stderr)


def _show(folder: Path, name: str | None, as_json: bool) -> None:
    path = find(folder)
    checkpoint = open_checkpoint(path)
    if name is None:
        _show_checkpoint(checkpoint, as_json)
    elif name in checkpoint:
        _show_tensor(checkpoint[name], as_json)
    else:
        # difflib only where it is needed: listing must start fast.
        import difflib

        near = difflib.get_close_matches(name, checkpoint.names, n=3, cutoff=0.5)
        raise CheckpointError(f"{path} has no tensor {name!r}" + (f"; nearest: {', '.join(near)}" if near else ""))


def _show_checkpoint(checkpoint: Checkpoint, as_json: bool) -> None:
    if as_json:
        _print_json(
            {
                "path": str(checkpoint.path),
                "saved": checkpoint.saved,
                "bytes": checkpoint.nbytes,
                "files": checkpoint.files,
                "meta": checkpoint.meta,
                "tensors": {name: _entry_json(entry) for name, entry in checkpoint.items()},
            }
        )
        return
    print(f"{checkpoint.path}")
    print(f"{len(checkpoint)} tensors, {_size(checkpoint.nbytes)}, saved {_age(time.time() - checkpoint.saved)} ago")
    for key, value in checkpoint.meta.items():
        text = json.dumps(value)
        print(f"  {key}: {text if len(text) <= _META_WIDTH else text[:_META_WIDTH] + ' ...'}")
    table = Table(box=None, header_style="bold")
    table.add_column("TENSOR", overflow="fold")
    table.add_column("DTYPE")
    for column in ("SHAPE", "SIZE", "BLOCKS"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, entry in checkpoint.items():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        table.add_row(Text(name), entry.dtype.name, shape, _size(entry.nbytes), str(len(entry.blocks)))
    _print_table(table)


def _show_tensor(entry: TensorEntry, as_json: bool) -> None:
    if as_json:
        _print_json({"name": entry.name, **_entry_json(entry)})
        return
    print(f"{entry.name}: {entry.dtype.name} {entry.shape}, {_size(entry.nbytes)}")
    for file, box in entry.blocks:
        print(f"  {file}: {box}")
    corner = Box(
        (0,) * len(entry.shape),
        tuple(min(n, _PREVIEW if i >= len(entry.shape) - 2 else 1) for i, n in enumerate(entry.shape)),
    )
    part = "" if corner.shape == entry.shape else f" {corner}"
    print(f"values{part}:\n{np.array2string(entry.read(corner), separator=', ')}")


def _info_json(c: CheckpointInfo) -> dict[str, Any]:
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


def _entry_json(entry: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": entry.dtype.name,
        "shape": entry.shape,
        "bytes": entry.nbytes,
        "blocks": [{"file": file, "offset": box.offset, "shape": box.shape} for file, box in entry.blocks],
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_table(table: Table) -> None:
    # Into a pipe, rich would fold the lines at 80 columns.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
