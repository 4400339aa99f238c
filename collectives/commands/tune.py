"""`python -m collectives tune`: measures the fastest algorithm for each range of sizes, and stores the table for "auto"."""

import argparse
import json
from pathlib import Path

from rich.table import Table as Shown
from rich.text import Text

from collectives.bench.kit.running import writable
from collectives.bench.tuning import CLEARLY, QUICK_SIZES, SIZES, tune
from collectives.communicator.communicator import Communicator
from collectives.selection import table_cache
from collectives.selection.selector import ALGORITHMS
from collectives.selection.table import Table, TableEntry
from collectives.shared.arguments import names_of, positive_seconds
from collectives.shared.tables import new_table, plural
from collectives.shared.terminal import Commands, UsageError, or_usage_error, print_once, several_ranks
from collectives.shared.units import parse_sizes
from collectives.texts import show_bytes

SECONDS, QUICK_SECONDS = 90.0, 20.0


def add_parser(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "tune",
        help="measure every algorithm on these ranks, and keep the fastest for auto on this machine (under mpirun)",
        description=f"Measures every algorithm from {show_bytes(SIZES[0])} to {show_bytes(SIZES[-1])}. Keeps, for this machine, MPI "
        "library and numbers of ranks and nodes, the fastest algorithm of each range of sizes; the next start uses this table. A "
        f"change of algorithm must be at least {CLEARLY:.0%} faster.",
    )
    parser.add_argument(
        "--op", type=names_of(list(ALGORITHMS), or_all=True), default=list(ALGORITHMS), metavar="OP,OP,..",
        help="measure only these operations; the table keeps its entries for the others (default: all)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"measure half of the sizes, in {QUICK_SECONDS:g} s")
    parser.add_argument(
        "--sizes",
        type=or_usage_error(parse_sizes),
        help="bytes of the whole array: a range in steps of 4, or a list such as 1KiB,3MiB",
    )
    parser.add_argument(
        "--seconds", type=positive_seconds, metavar="S", help=f"approximate time in all (default: {SECONDS:g})"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the table to this file, not to the user's cache; entries for other numbers of ranks and nodes stay",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print the choices, and write the table."""
    comm = several_ranks("tune")
    try:
        with comm.together():
            before, path = _before(comm, options.output)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.output:
        writable(comm, options.output)
    else:
        with comm.together():
            if comm.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    entries = [entry for entry, _ in tune(comm, operations=options.op, sizes=sizes, seconds=seconds)]
    with comm.together():
        if comm.rank == 0:
            new = before.with_entries(entries)
            table_cache.write(path, new if options.output else Table(new.entries, comm.machine()))
    said = f"Written to {path}." if options.output else f"Kept in {path}: the next start on such ranks uses it."
    print_once(_shown(entries, comm), Text(said))
    return 0


def _before(comm: Communicator, output: str | None) -> tuple[Table, Path]:
    """The old table, on rank 0, and the file to write. ValueError if the file exists and is not a table; OSError."""
    if output is None:
        return (comm.rank == 0 and table_cache.read(comm.machine())) or Table(()), table_cache.path_of(comm.machine())
    path = Path(output)
    if comm.rank != 0 or not path.exists() or path.stat().st_size == 0:
        return Table(()), path
    try:
        return Table.from_dict(json.loads(path.read_text())), path
    except ValueError as error:
        raise ValueError(f"{path} exists and is no table: {error}; choose another file") from None


def _shown(entries: list[TableEntry], comm: Communicator) -> Shown:
    title = f"algorithms of auto, {comm.size} ranks on {plural(comm.num_nodes, 'node')}"
    shown = new_table(("operation", "dtypes", "memory", "algorithm"), title=title, left=4)
    shown.columns[-1].no_wrap = False
    for entry in entries:
        parts = [f"{name} up to {show_bytes(up_to)}" for up_to, name in entry.choices[:-1] if up_to is not None]
        last = entry.choices[-1][1]
        chosen = ", ".join((*parts, f"then {last}" if parts else f"{last} at every size"))
        shown.add_row(entry.operation, entry.kind, entry.memory, chosen)
    return shown
