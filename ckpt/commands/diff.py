"""`diff A B`: shows the differences of two checkpoints, and their sizes."""

import argparse
from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from ckpt.check.comparing import Difference, MetaDifference, TensorDifference, compare
from ckpt.commands.terminal import (
    Commands,
    UsageError,
    add_json,
    index_text,
    new_table,
    place,
    print_json,
    print_table,
    printable,
    shape_text,
    shown_progress,
)
from ckpt.reading.checkpoint import open_checkpoint
from ckpt.storage.catalog import find

_MAX_LINES = 20  # names that only one has, and values of the meta; --json prints all
_VALUE_WIDTH = 60  # characters of a value of the meta


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("diff", help="show differences of two checkpoints; exit code 0: none, 1: some")
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, type=place, help="a checkpoint, like DIR of show")
    parser.add_argument(
        "--atol", type=_tolerance, default=0.0, metavar="X", help="elements x and y are the same if |x - y| <= X + ..."
    )
    parser.add_argument(
        "--rtol",
        type=_tolerance,
        default=0.0,
        metavar="R",
        help="... R * max(|x|, |y|); without both options, if their bits are the same",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help='compare only tensors with these names, such as "model/*", and not the meta; may be repeated',
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least 0")
    return value


def _run(args: argparse.Namespace) -> int:
    a, b = open_checkpoint(find(args.a)), open_checkpoint(find(args.b))
    with shown_progress("comparing", a.nbytes) as progress:
        found = compare(a, b, only=args.only, atol=args.atol, rtol=args.rtol, progress=progress)
    if args.only and not (found.num_compared or found.only_a or found.only_b):
        raise UsageError(f"neither checkpoint has a tensor called {' or '.join(map(repr, args.only))}")
    if args.json:
        print_json(
            {
                "a": str(a.path),
                "b": str(b.path),
                "same": not found,
                "only_a": found.only_a,
                "only_b": found.only_b,
                "tensors": [tensor._asdict() for tensor in found.tensors],
                "meta": [difference._asdict() for difference in found.meta],
            }
        )
    else:
        _print(found)
    return int(bool(found))


def _print(found: Difference) -> None:
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        for name in names[:_MAX_LINES]:
            print(f"only in {side}: {name}")
        _print_more(len(names))
    for difference in found.meta[:_MAX_LINES]:
        print(meta_line(difference))
    _print_more(len(found.meta))
    if found.tensors:
        print_table(tensor_table(found.tensors))
    differing = f"{len(found.tensors)} of {found.num_compared} tensors differ"
    print(differing if found else f"no difference in {found.num_compared} tensors")


def tensor_table(tensors: Iterable[TensorDifference]) -> Table:
    """A row for each tensor."""
    table = new_table("TENSOR", "CHANGE", "DIFFERING>", "OF>", "FIRST>", "MAX ABS>", "MAX REL>", "NAN, INF>")
    for tensor in tensors:
        table.add_row(*_cells(tensor))
    return table


def meta_line(difference: MetaDifference) -> str:
    """A difference of the meta in a line."""
    return f"meta {printable(difference.key)}: {' -> '.join(_values(difference.a, difference.b))}"


def _values(a: str | None, b: str | None) -> Iterator[str]:
    """Two values of the meta. Long ones begin shortly before their first difference."""
    common = 0
    if a is not None and b is not None and max(len(a), len(b)) > _VALUE_WIDTH:
        pairs = enumerate(zip(a, b, strict=False))
        common = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    begin = max(0, common - _VALUE_WIDTH // 4)
    end = begin + _VALUE_WIDTH
    for text in (a, b):
        if text is None:
            yield "nothing"
        else:
            yield f"{'... ' if begin else ''}{text[begin:end]}{' ...' if end < len(text) else ''}"


def _print_more(count: int) -> None:
    if count > _MAX_LINES:
        print(f"... and {count - _MAX_LINES} more (--json prints all)")


def _cells(tensor: TensorDifference) -> list[str | Text]:
    shapes = [shape_text(shape) for shape in tensor.shapes]
    changes = [f"{x} -> {y}" for x, y in (tensor.dtypes, shapes) if x != y]
    cells: list[str | Text] = [Text(tensor.name), ", ".join(changes) or "values"]
    if tensor.num_differing is None:
        return cells
    first = "" if tensor.first is None else index_text(tensor.first)
    sizes = [f"{n:.4g}" if isinstance(n, float) else str(n) for n in (tensor.max_abs, tensor.max_rel)]
    return [*cells, str(tensor.num_differing), str(tensor.size), first, *sizes, str(tensor.num_special)]
