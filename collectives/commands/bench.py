"""`python -m collectives bench`: times every algorithm, the MPI library's own collectives and Gloo; with --codec, the codec."""

import argparse
import sys
from contextlib import ExitStack
from functools import partial

import collectives
from collectives.arrays.dtypes import TABLE, number_of
from collectives.bench import codec
from collectives.bench.calls import Entrants
from collectives.bench.gloo import Gloo
from collectives.bench.kit.running import measure_and_show
from collectives.bench.kit.turns import make_each
from collectives.bench.overhead import overhead
from collectives.bench.peer import Peer
from collectives.bench.plain_mpi import PlainMpi
from collectives.bench.plot import plot
from collectives.bench.results import CollectivesLaunch, Measurement, Skipped
from collectives.bench.show import tables
from collectives.bench.timing import LEAST_ROUNDS, Limits, measure
from collectives.codec.formats import FORMATS
from collectives.communicator.communicator import Communicator
from collectives.selection.selector import ALGORITHMS, EXACT
from collectives.selection.wire import AUTO
from collectives.shared.arguments import add_json, add_plot, names_of, positive_seconds
from collectives.shared.terminal import Commands, UsageError, or_usage_error, positive, several_ranks
from collectives.shared.units import parse_sizes

ARRAYS = ("numpy", "torch")
PEERS: dict[str, type[Peer]] = {"mpi": PlainMpi, "gloo": Gloo}
SIZES, CODEC_SIZES = "1KiB..256MiB", "64MiB"


def add_parser(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "bench",
        help="time every algorithm, the MPI library's collectives and Gloo (under mpirun)",
        description="Times auto, every algorithm and the peers in turn, in one launch. The figures are medians over the rounds of "
        "the slowest rank's time. To compare machines or versions, write --json in several launches, then use "
        "python -m collectives report.",
    )
    parser.add_argument(
        "--op", type=names_of(list(ALGORITHMS), or_all=True), default=["all_reduce"], metavar="OP,OP,..",
        help=f"of {', '.join(ALGORITHMS)}, or all (default: all_reduce)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=or_usage_error(parse_sizes),
        help="bytes of the whole array: a range in steps of 4, or a list such as 1KiB,3MiB "
        f"(default: {SIZES}; with --codec {CODEC_SIZES})",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        type=or_usage_error(lambda text: [number_of(name.strip()).name for name in text.split(",")]),
        default=["float32"],
        metavar="DTYPE,..",
        help=f"of {', '.join(TABLE)} (default: float32)",
    )
    parser.add_argument(
        "--peers", type=names_of(list(PEERS), or_none=True), default=["mpi"], metavar="mpi,gloo",
        help="mpi: the MPI library through plain mpi4py; gloo: torch.distributed with Gloo (default: mpi)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=names_of(("private", "node")), default=["private", "node"], metavar="KIND,KIND",
        help="private: ordinary arrays; node: the whole array is in node memory, from empty() or node.shared() (default: private,node)",
    )  # fmt: skip
    parser.add_argument(
        "--wire", choices=(*FORMATS, AUTO), default=EXACT,
        help='on several nodes only: the format of data between nodes in "auto" and "encoded"; other algorithms send elements as they '
        f"are; {AUTO} measures, and takes int8 or fp32 (default: fp32)",
    )  # fmt: skip
    parser.add_argument("--arrays", choices=ARRAYS, default="numpy", help="library of the arrays (default: numpy)")
    parser.add_argument(
        "--seconds", type=positive_seconds, default=2.0, metavar="S",
        help=f"time for each operation, dtype and size; it decides the number of rounds, at least {LEAST_ROUNDS} (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds",
        type=positive,
        default=200,
        help="maximum number of timed calls of each algorithm or peer (default: 200)",
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help="also measure the Python time per call, compared with raw mpi4py, at 1 KiB, for NumPy and torch arrays",
    )
    parser.add_argument(
        "--codec", action="store_true",
        help="measure the codec of links instead, in all formats, on every rank at the same time (also without mpirun); "
        "only --sizes, --seconds, --rounds and --json apply",
    )  # fmt: skip
    add_json(parser)
    add_plot(parser, "busbw against size")


def run(options: argparse.Namespace) -> int:
    """Measure, print the tables, and write the files."""
    if options.codec:
        if options.plot:
            raise UsageError("argument --plot: bench --codec draws no picture; expected --json, or no --codec")
        if options.wire != EXACT:
            raise UsageError("argument --wire: bench --codec measures all formats; expected one of the two")
        world = collectives.world()
        sizes = options.sizes or parse_sizes(CODEC_SIZES)
        measure_and_show(world, lambda: _measure_codec(world, sizes, options), codec.tables, json=options.json)
        return 0
    comm = several_ranks("bench")
    measure_and_show(comm, lambda: _measure(comm, options), tables, json=options.json, plot=options.plot, draw=plot)
    return 0


def _measure(comm: Communicator, options: argparse.Namespace) -> CollectivesLaunch:
    results: list[Measurement] = []
    if options.wire != EXACT:
        comm = comm.with_wire(options.wire)
    cases = [(operation, dtype) for operation in options.op for dtype in options.dtype]
    limits = Limits(options.rounds, options.seconds)
    with ExitStack() as ended:
        peers, reasons = make_each({PEERS[name].name: partial(PEERS[name], comm, ended) for name in options.peers})
        skipped = [Skipped(*case, name, "private", reason) for name, reason in reasons.items() for case in cases]
        entrants = Entrants(options.memory, list(peers.values()), options.arrays)
        sizes = options.sizes or parse_sizes(SIZES)
        for operation, dtype in cases:
            if comm.rank == 0:  # the tables come at the end, after minutes
                seconds = len(sizes) * len(options.memory) * options.seconds
                print(
                    f"measuring {operation} of {dtype}, {len(sizes)} sizes: about {seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            for size in sizes:
                rows, left_out = measure(comm, operation, size, number_of(dtype), entrants, limits)
                results += rows
                skipped += left_out
        over = overhead(comm, options.op, seconds_each=options.seconds) if options.overhead else []
    return CollectivesLaunch.of(comm, arrays=options.arrays, results=results, skipped=skipped, overhead=over)


def _measure_codec(comm: Communicator, sizes: list[int], options: argparse.Namespace) -> codec.CodecLaunch:
    results = [row for size in sizes for row in codec.measure(comm, size, options.rounds, options.seconds)]
    return codec.CodecLaunch.of(comm, results=results)
