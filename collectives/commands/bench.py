"""`python -m collectives bench`: time every algorithm beside the MPI library's own."""

import argparse

import collectives
from collectives import bench
from collectives.commands.terminal import Commands, UsageError, console, or_usage_error, positive
from collectives.dtypes import dtype_of
from collectives.units import parse_sizes


def add_parser(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("bench", help="time every algorithm beside the MPI library's own (under mpirun)")
    parser.add_argument("--op", choices=bench.OPERATIONS, default="all_reduce", help="default: all_reduce")
    parser.add_argument(
        "--sizes",
        type=or_usage_error(parse_sizes),
        default="1KiB..64MiB",
        help="bytes of the whole array: a range in steps of 4, or a list such as 1KiB,3MiB (default: 1KiB..64MiB)",
    )
    parser.add_argument("--dtype", type=or_usage_error(lambda name: dtype_of(name).name), default="float32")
    parser.add_argument("--rounds", type=positive, default=30, help="timed calls of each (default: 30)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, and write the JSON file."""
    comm = collectives.world()
    if comm.size == 1:
        raise UsageError("bench needs at least two ranks: mpirun -np 2 python -m collectives bench")
    if options.json:
        with comm.together():  # found now rather than when all is measured
            if comm.rank == 0:
                open(options.json, "a").close()
    results = bench.measure(comm, options.op, options.sizes, dtype_of(options.dtype), options.rounds)
    if comm.rank == 0:
        console().print(bench.table(comm, results))
        if options.json:
            bench.write_json(options.json, comm, results)
    return 0
