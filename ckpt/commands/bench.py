"""`bench`: compares the time of saving and loading with plain POSIX files and torch's DCP."""

import argparse
from typing import Any

import collectives
from ckpt.bench.bench_report import tables
from ckpt.bench.results import CheckpointLaunch
from ckpt.commands.terminal import Commands, UsageError, complain
from collectives.shared.arguments import add_json, add_report, names_of
from collectives.shared.terminal import console, or_usage_error, positive
from collectives.shared.units import parse_size

PEERS = ("posix", "dcp")
DRIVERS = ("posix", "mpio", "mpio-collective")


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser(
        "bench",
        help="compare the time of saving and loading with plain POSIX files and torch's DCP (under mpirun)",
        description="Saves, loads, and saves in the background, in turn with the peers, in one launch (under mpirun). Times are of "
        "the slowest rank, medians over the rounds. For figures that can be compared: several launches with --json, then --report.",
    )
    parser.add_argument(
        "--peers", type=names_of(PEERS, or_none=True), default=list(PEERS), metavar="posix,dcp",
        help="posix: a file per rank, with write and fsync; dcp: torch.distributed.checkpoint (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--drivers", type=names_of(DRIVERS), default=["posix"], metavar="NAME,..",
        help=f"drivers: {', '.join(DRIVERS)} (default: posix)",
    )  # fmt: skip
    parser.add_argument(
        "--layouts", type=_layouts, default=["rank", "one"], metavar="FILES,..",
        help="rank, node, one, or numbers: values of the argument `files` of ckpt.save (default: rank,one)",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=or_usage_error(parse_size), default="1.2GB",
        help="size of the state: the sum over all ranks (default: 1.2GB)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5, help="timed rounds, after one more (default: 5)")
    parser.add_argument(
        "--dir",
        help="parent of a temporary folder for all files, which is removed at the end (default: here)",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="drop the files from the page cache before each load, instead of reading from it",
    )
    add_json(parser)
    add_report(parser)
    parser.set_defaults(run=_run)


def _layouts(text: str) -> list[Any]:
    """'rank,2' as ["rank", 2]. The number of ranks is checked later."""
    return [int(part) if part.isdecimal() else part for part in dict.fromkeys(map(str.strip, text.split(",")))]


def _run(args: argparse.Namespace) -> int:
    if args.report:
        if collectives.launched_rank() <= 0:  # one process is enough, also under mpirun
            try:
                launches = [CheckpointLaunch.read(file) for file in args.report]
            except ValueError as error:
                raise UsageError(str(error)) from error
            console().print(*tables(launches), sep="\n")
        return 0
    from ckpt.bench.bench_command import main

    comm = collectives.world()
    try:
        main(args, comm)
    except Exception as error:
        if not collectives.on_all_ranks(error):
            raise  # ends the job, with this rank's traceback
        complain(error, of_all_ranks=True)
        return 2
    return 0
