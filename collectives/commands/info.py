"""`python -m collectives info`: shows MPI, ranks, nodes, memory, dtypes and algorithms."""

import argparse
import os
from importlib.metadata import version

from rich import box
from rich.table import Table
from rich.text import Text

import collectives
from collectives.arrays.dtypes import MOVED, TABLE
from collectives.environment import memory_folder
from collectives.selection.selector import ALGORITHMS
from collectives.selection.wire import load_codec
from collectives.shared.terminal import Commands, console
from collectives.texts import show_bytes
from collectives.version import release


def add_parser(commands: Commands) -> None:
    """Add the command, which has no flags."""
    commands.add_parser("info", help="show the MPI library, ranks, nodes, shared memory, dtypes and algorithms")


def run(options: argparse.Namespace) -> int:
    """Show the table: under mpirun for all ranks, else for this process."""
    # Before the modules that import mpi4py, so that it says what is wrong with the MPI library.
    comm = collectives.world()
    from collectives.transports import mpi
    from collectives.transports.gpu import cuda
    from collectives.transports.node import memory

    folder = memory_folder()
    codecs = dict.fromkeys(comm.all_gather_object(load_codec(comm.node)[:2]))
    nodes: dict[str, int] = {}
    for name in comm.all_gather_object(os.uname().nodename):
        nodes[name] = nodes.get(name, 0) + 1
    if comm.rank == 0:
        table = Table(show_header=False, box=box.SIMPLE)
        table.add_row("mpitrain", str(release()))
        table.add_row("MPI library", mpi.library_version())
        table.add_row("mpi4py", version("mpi4py"))
        table.add_row("ranks", str(comm.size))
        table.add_row("nodes", f"{comm.num_nodes} ({', '.join(f'{name}: {n}' for name, n in nodes.items())})")
        free = show_bytes(memory.room())
        table.add_row("shared memory", f"{folder}, {free} free" + ("" if comm.num_nodes == 1 else " on rank 0's node"))
        reads = "read directly" if comm.node.reads_peers else "not readable: copied through shared memory"
        table.add_row("private memory of peers", reads)
        table.add_row(
            "asynchronous operations", "on a progress thread" if comm.has_progress_thread else "carried out at wait()"
        )
        for label, text in cuda.info_lines():
            table.add_row(label, Text(text))  # a Text, so that brackets are not read as markup
        table.add_row("codec of links", Text(", ".join(f"{name} ({why})" for name, why in codecs)))
        table.add_row("dtypes", ", ".join(TABLE))
        table.add_row("only moved", ", ".join(MOVED))
        for operation in ALGORITHMS:
            table.add_row(operation, ", ".join(("auto", *comm.algorithms(operation))))
        console().print(table)
    return 0
