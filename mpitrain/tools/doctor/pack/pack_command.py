"""`python -m mpitrain pack FILE`."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from collectives import version
from mpitrain.tools.doctor.pack import archive, contents

_EPILOG = """\
then, in the job, each rank through the file (the first rank of a node unpacks it into the node's memory):
  srun --mpi=pmix bash FILE python -m mpitrain ...
  mpirun -np 8 bash FILE python -m mpitrain ...
bash FILE --help shows more."""


def main(words: Sequence[str]) -> None:
    """Make a pack of the environment in which this runs."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain pack",
        description="Put this environment of Python, and the Python it was made from if it is not the system's, into one file. "
        "On a parallel file system a job starts from it with two reads a rank instead of thousands.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to make, such as $SCRATCH/env.pack")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out the files and folders whose path ends so, such as /site-packages/jaxlib (may be given several times)",
    )
    given = parser.parse_args(words)
    target: Path = given.file
    _check(target)
    began_s = time.monotonic()
    found = contents.layout()
    was = str(found.trees[0][1])
    about = "\n".join([f"mpitrain {version.release()}", *contents.describe(found)])
    size = archive.write(target, contents.entries(found, given.without), found, was=was, about=about, tell=_tell)
    if sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr)
    print(
        f"{target}: {size.packed / 1e9:.2f} GB, {size.num_files:,} files, packed in {time.monotonic() - began_s:.0f} s; "
        f"it takes {size.unpacked / 1e9:.2f} GB of a node's memory"
    )


def _check(target: Path) -> None:
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name the file to make, such as {target / 'env.pack'}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target.absolute().parent} does not exist: make this folder first")
    if target.exists():
        with target.open("rb") as file:
            if b"mpitrain pack" not in file.read(200):
                raise ValueError(f"{target} exists and is no pack: remove it, or name another file")
    if not os.access(target.absolute().parent, os.W_OK):
        raise ValueError(f"{target.absolute().parent} cannot be written: name a file in another folder")


def _tell(num_files: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{num_files:,} files", end="", file=sys.stderr, flush=True)
