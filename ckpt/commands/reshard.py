"""`reshard DIR OUT --files N`: writes a checkpoint again, in N files."""

import argparse

from ckpt.commands.terminal import (
    Commands,
    add_checkpoint,
    add_json,
    local,
    print_json,
    printable,
    shown_progress,
    size_text,
    told_in_a_line,
)
from ckpt.convert.resharding import reshard
from ckpt.reading.checkpoint import Checkpoint, open_checkpoint
from ckpt.storage.catalog import find


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("reshard", help="write a checkpoint again with another number of files, offline")
    add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", type=local, help="the new checkpoint")
    add_files(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint OUT, which may be DIR itself")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(find(args.dir))
    with told_in_a_line(), shown_progress("resharding", 2 * checkpoint.nbytes) as progress:
        path = reshard(checkpoint.path, args.out, files=args.files, overwrite=args.overwrite, progress=progress)
    print_made(open_checkpoint(path), as_json=args.json)


def add_files(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the option `--files`."""
    parser.add_argument(
        "--files",
        metavar="N|one",
        type=_files,
        required=default is None,
        default=default,
        help="number of data files of about the same size" + (f" ({default})" if default else ""),
    )


def print_made(checkpoint: Checkpoint, *, as_json: bool) -> None:
    """Print a line, or JSON, about a new checkpoint."""
    if as_json:
        about = {"path": str(checkpoint.path), "tensors": len(checkpoint), "bytes": checkpoint.nbytes}
        print_json({**about, "files": checkpoint.files, "meta": checkpoint.meta})
        return
    files = len(checkpoint.files) - 1  # without the index
    print(
        f"{printable(str(checkpoint.path))}: {len(checkpoint)} tensors, {size_text(checkpoint.nbytes)}, "
        f"in {files} data file{'s' * (files != 1)}; read back and whole"
    )


def _files(text: str) -> int | str:
    if text == "one":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected 'one', or a number of at least 1")
    return int(text)
