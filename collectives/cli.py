"""`python -m collectives check | cost | info | bench | tune | report`: proves schedules, computes costs, shows this machine, measures.

Each command prints on rank 0. Wrong input ends with one line and exit code 2 on all ranks. `check`, `cost`, `report` need no MPI.
"""

import argparse
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from rich.text import Text

from collectives.commands import bench, check, cost, info, report_command, tune
from collectives.commands.closed_pipe import ends_with_its_reader
from collectives.diagnosis import on_all_ranks
from collectives.diagnosis.start.library import one_line_without_mpi
from collectives.shared.terminal import UsageError, console, print_once

COMMANDS: dict[str, ModuleType] = {
    "check": check, "cost": cost, "info": info, "bench": bench, "tune": tune, "report": report_command,
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


@one_line_without_mpi("collectives")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (sys.argv's by default) and return the exit code. SystemExit if MPI cannot be loaded."""
    try:
        with ends_with_its_reader():
            options = _parser().parse_args(arguments)
            code: int = COMMANDS[options.command].run(options)
        return code
    except (UsageError, OSError) as error:
        line = Text(f"collectives: {error}")
        if isinstance(error, UsageError) or on_all_ranks(error):
            print_once(line, stderr=True)
        else:
            console(stderr=True).print(line)
        return 2


def _parser() -> argparse.ArgumentParser:
    names = " | ".join(COMMANDS)
    parser = _Parser(prog="python -m collectives", description=f"Collectives between MPI ranks: {', '.join(COMMANDS)}.")
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    for command in COMMANDS.values():
        command.add_parser(commands)
    return parser
