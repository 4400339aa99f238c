"""`export DIR OUT`: writes a checkpoint's tensors as safetensors, torch's `.pt`, `.npz` or one plain HDF5 file."""

import argparse
import re

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
from ckpt.convert.exporting import SUFFIXES, export
from ckpt.convert.formats.plain_hdf5 import COMPRESSIONS
from ckpt.reading.checkpoint import open_checkpoint
from ckpt.reading.sources import matching
from ckpt.storage.catalog import find


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("export", help="write the tensors as safetensors, .pt, .npz or one plain HDF5 file")
    add_checkpoint(parser)
    parser.add_argument(
        "out",
        metavar="OUT",
        type=local,
        help=f"a file with the suffix of a format: {', '.join(SUFFIXES)}; or a folder for model.safetensors, in files of 5 GB",
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help="only tensors with these names, such as 'model/*'; repeatable",
    )
    parser.add_argument("--strip", metavar="PREFIX", default="", help="remove this prefix, such as model/, from names")
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=_size,
        help="split safetensors into files of at most this size, such as 5GB, with an index",
    )
    parser.add_argument("--compression", choices=COMPRESSIONS, help="for HDF5; zstd needs hdf5plugin, also to read")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(find(args.dir))
    with told_in_a_line():
        wanted = matching(checkpoint.names, args.only)
        nbytes = sum(checkpoint[name].nbytes for name in wanted)
        with shown_progress("exporting", nbytes) as progress:
            files = export(
                checkpoint.path,
                args.out,
                only=args.only,
                strip=args.strip,
                shard_bytes=args.shard_size,
                compression=args.compression,
                overwrite=args.overwrite,
                progress=progress,
            )
    if args.json:
        made = [{"path": str(file), "bytes": file.stat().st_size} for file in files]
        print_json({"checkpoint": str(checkpoint.path), "tensors": len(wanted), "files": made})
        return
    for file in files:
        print(f"{printable(str(file))}: {size_text(file.stat().st_size)}")


def _size(text: str) -> int:
    """Bytes from "5GB", "500 MiB" or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(I?))?B?", text.strip().upper())
    nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a size such as 5GB (10^9 bytes each) or 512MiB (2^20)")
    return nbytes
