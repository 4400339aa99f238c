"""Helpers of all commands: common arguments, tables, JSON, sizes and ages."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import collectives
from ckpt.storage.places import Place, place_of
from ckpt.storage.progress import Progress, no_progress
from ckpt.storage.remote import Url
from collectives.shared.terminal import Commands as Commands
from collectives.shared.terminal import UsageError as UsageError
from collectives.texts import shown, without_secrets


def complain(error: Exception, *, of_all_ranks: bool) -> None:
    """Print one line on stderr. `of_all_ranks`: if a launcher has started several ranks, all of them call this, and rank 0 prints.

    The function returns after the output, because a launcher ends the job as soon as one rank has ended with an error.
    """
    comm = collectives.world() if of_all_ranks and collectives.launched_rank() >= 0 else None
    if comm is None or comm.rank == 0:
        line = "; ".join([f"ckpt: {error}", *getattr(error, "__notes__", ())])
        print(shown(without_secrets(line), lines=True), file=sys.stderr, flush=True)
    if comm is not None:
        comm.barrier()
        collectives.leave_together()


def place(text: str) -> Place:
    """An argument that names a folder or a URL."""
    try:
        return place_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def local(text: str) -> Path:
    """An argument that names a local file or folder."""
    found = place(text)
    if isinstance(found, Url):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a URL; expected a path: URLs are only read, not written or cleared"
        )
    return found


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`, which each command has."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the argument `DIR` of a command that reads one checkpoint; `ckpt.find` takes it."""
    parser.add_argument(
        "dir",
        metavar="DIR",
        type=place,
        help="a checkpoint; or a run or a folder of checkpoints, for the newest complete one; or a URL",
    )


def print_json(value: Any) -> None:
    """Print `value` as indented JSON. NaN and infinities, which JSON lacks, become texts: "NaN", "-Infinity"."""
    print(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def new_table(*columns: str) -> Table:
    """A table without lines. A column whose name ends with ">" is aligned to the right."""
    table = Table(box=None, header_style="bold")
    for column in columns:
        justify = "right" if column.endswith(">") else "left"
        table.add_column(column.rstrip(">"), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def print_table(table: Table) -> None:
    """Print a table; outside of a terminal its lines are never folded."""
    # In a pipe, rich would fold the lines at 80 columns.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


@contextmanager
def shown_progress(doing: str, nbytes: int | None) -> Iterator[Progress]:
    """Show, on a terminal, a line with the share of `nbytes` that is done, and remove it at the end."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Line

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Line(TextColumn("{task.description}"), *columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(doing, total=nbytes)
        yield lambda more: line.advance(task, more)


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """Turn a ValueError or FileExistsError in the block into a UsageError, because the user's request was wrong.

    Messages that name arguments of functions then name the options.
    """
    try:
        yield
    except (ValueError, FileExistsError) as error:
        text = str(error).replace("overwrite=True (--overwrite)", "--overwrite")
        raise UsageError(text.replace("overwrite=True", "--overwrite").replace("only= ", "--only ")) from None


def can_print(text: str) -> bool:
    """Whether stdout's encoding has these characters; otherwise `ckpt.cli` prints escapes."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def printable(name: str) -> str:
    """A text of a file, such as a name, with escapes for characters that could attack the terminal."""
    return shown(name)


def size_text(nbytes: int) -> str:
    """Bytes for people: "16.3 MiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age_text(seconds: float) -> str:
    """Seconds for people: "12 min"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def index_text(index: tuple[int, ...]) -> str:
    """The index of an element as NumPy takes it: "[0, 3]"; a scalar has none."""
    return f"[{', '.join(map(str, index))}]" if index else ""


def shape_text(shape: tuple[int, ...]) -> str:
    """A tensor's shape: "576 x 192"."""
    return " x ".join(map(str, shape)) or "scalar"
