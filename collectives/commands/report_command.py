"""`python -m collectives report`: medians over several launches of bench. Needs no MPI."""

import argparse
from pathlib import Path

from rich.text import Text

from collectives.bench.bench_report import LEGEND, heading, markdown, sections
from collectives.bench.kit.launches import alike
from collectives.bench.results import CollectivesLaunch
from collectives.shared.terminal import Commands, UsageError, print_once


def add_parser(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "report", help="medians over several launches of bench, and auto compared with its peers (runs without MPI)"
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files of bench --json, one for each launch")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables to this file instead of printing them")


def run(options: argparse.Namespace) -> int:
    """Read the files, and print or write a table for each operation, dtype and memory."""
    try:
        launches = [CollectivesLaunch.read(file) for file in options.files]
    except ValueError as error:
        raise UsageError(str(error)) from None
    if options.markdown:
        Path(options.markdown).write_text(markdown(launches))
        return 0
    for group in alike(launches):
        print_once(Text(heading(group[0])), *(section.rich() for section in sections(group)))
    print_once(Text(LEGEND))
    return 0
