"""`python -m collectives bench`: every algorithm beside the MPI library's own and Gloo."""

import argparse

from collectives.arrays.dtypes import TABLE, number_of
from collectives.bench.contestants import ARRAYS, OPERATIONS
from collectives.bench.gloo import Gloo
from collectives.bench.overhead import overhead
from collectives.bench.plot import NoMatplotlibError, need_matplotlib, plot
from collectives.bench.results import PEERS, Launch, Measurement, Skipped
from collectives.bench.show import tables
from collectives.bench.timing import LEAST_ROUNDS, Limits, measure
from collectives.bench.units import parse_sizes
from collectives.commands.measuring import names_of, positive_seconds, several_ranks, writable
from collectives.commands.terminal import Commands, UsageError, console, or_usage_error, positive
from collectives.communicator.communicator import Communicator

SIZES = "1KiB..256MiB"


def add_parser(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "bench",
        help="time every algorithm beside the MPI library's own and Gloo (under mpirun)",
        description="Times auto, every algorithm and the peers in turn, in one launch: the median over the rounds of the slowest "
        "rank's time. For figures that can be compared take --json of several launches, and python -m collectives report.",
    )
    parser.add_argument(
        "--op",
        type=names_of(OPERATIONS, all_of_them=True),
        default=["all_reduce"],
        metavar="OP,OP,..",
        help=f"of {', '.join(OPERATIONS)}, or all (default: all_reduce)",
    )
    parser.add_argument(
        "--sizes",
        type=or_usage_error(parse_sizes),
        default=SIZES,
        help=f"bytes of the whole array: a range in steps of 4, or a list such as 1KiB,3MiB (default: {SIZES})",
    )
    parser.add_argument(
        "--dtype",
        type=or_usage_error(lambda text: [number_of(name.strip()).name for name in text.split(",")]),
        default=["float32"],
        metavar="DTYPE,..",
        help=f"of {', '.join(TABLE)} (default: float32)",
    )
    parser.add_argument(
        "--peers",
        type=lambda text: names_of(list(PEERS))(text) if text else [],
        default=["mpi"],
        metavar="mpi,gloo",
        help="mpi: the library called through plain mpi4py; gloo: torch.distributed's (default: mpi)",
    )
    parser.add_argument(
        "--memory",
        type=names_of(("private", "node")),
        default=["private", "node"],
        metavar="KIND,KIND",
        help="private: ordinary arrays; node: the whole array from empty() or node.shared() (default: private,node)",
    )
    parser.add_argument("--arrays", choices=ARRAYS, default="numpy", help="of which library (default: numpy)")
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=2.0,
        metavar="S",
        help=f"time for each operation, dtype and size: decides the rounds, {LEAST_ROUNDS} at least (default: 2)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=200, help="timed calls of each at most, however fast they are (default: 200)"
    )
    parser.add_argument(
        "--overhead", action="store_true", help="also Python's time a call over raw mpi4py at 1 KiB, NumPy and torch"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw busbw against size (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Measure, print the tables, and write the files."""
    comm = several_ranks("bench")
    if options.plot:
        try:
            need_matplotlib()
        except NoMatplotlibError as error:
            raise UsageError(str(error)) from None
    writable(comm, options.json, options.plot)
    launch = _measure(comm, options)
    with comm.together():
        if comm.rank == 0:
            if options.json:
                launch.write(options.json)
            if options.plot:
                plot(options.plot, launch)
            console().print(*tables(launch), sep="\n")
    return 0


def _measure(comm: Communicator, options: argparse.Namespace) -> Launch:
    gloo = None
    results: list[Measurement] = []
    skipped: list[Skipped] = []
    peers = list(options.peers)
    if "gloo" in peers:
        try:
            gloo = Gloo(comm)
        except RuntimeError as error:
            peers.remove("gloo")
            skipped += [
                Skipped(op, dtype, PEERS["gloo"], "private", str(error)) for op in options.op for dtype in options.dtype
            ]
    for operation in options.op:
        for dtype in options.dtype:
            for size in options.sizes:
                rows, left_out = measure(
                    comm,
                    operation,
                    size,
                    number_of(dtype),
                    limits=Limits(options.rounds, options.seconds),
                    memories=options.memory,
                    arrays=options.arrays,
                    peers=[PEERS[name] for name in peers],
                    gloo=gloo,
                )
                results += rows
                skipped += left_out
    over = overhead(comm, options.op, seconds_each=options.seconds) if options.overhead else []
    if gloo is not None:
        gloo.close()
    return Launch(comm.machine(), comm.size, comm.num_nodes, options.arrays, results, skipped, over)
