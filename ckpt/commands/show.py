"""`show DIR [TENSOR]`: what one checkpoint holds, or one tensor of it."""

import argparse
import difflib
import json
import time
from typing import Any

import numpy as np
from rich.text import Text

from ckpt.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from ckpt.commands.terminal import (
    Commands,
    add_checkpoint,
    add_json,
    age_text,
    new_table,
    print_json,
    print_table,
    shape_text,
    size_text,
)
from ckpt.folder import find
from ckpt.layout import Box
from ckpt.manifest import CheckpointError

_PREVIEW = 6  # values along each of the last two dimensions
_META_WIDTH = 200  # characters of a value of the meta; --json prints all


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("show", help="what one checkpoint holds, or one tensor of it")
    add_checkpoint(parser)
    parser.add_argument("tensor", metavar="TENSOR", nargs="?", help="the name of a tensor: its blocks and first values")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(find(args.dir))
    if args.tensor is None:
        _show_checkpoint(checkpoint, args.json)
    else:
        _show_tensor(_named(checkpoint, args.tensor), args.json)


def _named(checkpoint: Checkpoint, name: str) -> TensorEntry:
    if name in checkpoint:
        return checkpoint[name]
    near = difflib.get_close_matches(name, checkpoint.names, n=3, cutoff=0.5)
    raise CheckpointError(
        f"{checkpoint.path} has no tensor {name!r}" + (f"; nearest: {', '.join(near)}" if near else "")
    )


def _show_checkpoint(checkpoint: Checkpoint, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "path": str(checkpoint.path),
                "saved": checkpoint.saved,
                "bytes": checkpoint.nbytes,
                "files": checkpoint.files,
                "meta": checkpoint.meta,
                "tensors": {name: _json(entry) for name, entry in checkpoint.items()},
            }
        )
        return
    print(f"{checkpoint.path}")
    age = age_text(time.time() - checkpoint.saved)
    print(f"{len(checkpoint)} tensors, {size_text(checkpoint.nbytes)}, saved {age} ago")
    for key, value in checkpoint.meta.items():
        text = json.dumps(value)
        print(f"  {key}: {text if len(text) <= _META_WIDTH else text[:_META_WIDTH] + ' ...'}")
    table = new_table("TENSOR", "DTYPE", "SHAPE>", "SIZE>", "BLOCKS>")
    for name, entry in checkpoint.items():
        blocks = str(len(entry.blocks))
        table.add_row(Text(name), entry.dtype.name, shape_text(entry.shape), size_text(entry.nbytes), blocks)
    print_table(table)


def _show_tensor(entry: TensorEntry, as_json: bool) -> None:
    if as_json:
        print_json({"name": entry.name, **_json(entry)})
        return
    print(f"{entry.name}: {entry.dtype.name} {entry.shape}, {size_text(entry.nbytes)}")
    for file, box in entry.blocks:
        print(f"  {file}: {box}")
    corner = Box(
        (0,) * len(entry.shape),
        tuple(min(n, _PREVIEW if i >= len(entry.shape) - 2 else 1) for i, n in enumerate(entry.shape)),
    )
    part = "" if corner.shape == entry.shape else f" {corner}"
    print(f"values{part}:\n{np.array2string(entry.read(corner), separator=', ')}")


def _json(entry: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": entry.dtype.name,
        "shape": entry.shape,
        "bytes": entry.nbytes,
        "blocks": [{"file": file, "offset": box.offset, "shape": box.shape} for file, box in entry.blocks],
    }
