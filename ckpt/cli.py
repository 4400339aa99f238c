"""`python -m ckpt COMMAND`: inspects and maintains checkpoints, without MPI, and without torch except for torch's own files.

Only `bench` runs on several ranks.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from ckpt.commands import bench, diff, export, gc, import_, ls, reshard, show, verify
from ckpt.commands.terminal import UsageError, complain
from ckpt.format.manifest import CheckpointError
from collectives import launched_rank
from collectives.commands.closed_pipe import ends_with_its_reader
from collectives.diagnosis.start.library import one_line_without_mpi

# The order of --help.
COMMANDS: tuple[ModuleType, ...] = (ls, show, diff, verify, export, import_, reshard, gc, bench)
ERROR = 2  # the exit code for an error; 1 is an answer, as in GNU diff: "they differ"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if launched_rank() >= 0:  # all ranks have the same arguments: only one prints
            raise UsageError(f"{self.prog.rpartition(' ')[2]}: {message}")
        super().error(message)


@one_line_without_mpi("ckpt")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, a command's own 1, or 2 after one line with the error.

    SystemExit with one line, which is exit code 1, if MPI cannot be loaded.
    """
    parser = _Parser(
        prog="python -m ckpt",
        description="Inspect and maintain checkpoints. Only bench needs MPI.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    # Names may have characters that a terminal's encoding lacks; stderr escapes them by default.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with ends_with_its_reader():  # of --help
            args = parser.parse_args(argv)
    except UsageError as error:
        complain(error, of_all_ranks=True)
        return ERROR
    try:
        with ends_with_its_reader():
            code: int | None = args.run(args)
    except (UsageError, CheckpointError, OSError) as error:
        complain(error, of_all_ranks=False)
        return ERROR
    except RecursionError:
        print("ckpt: the checkpoint's meta is nested too deeply", file=sys.stderr)
        return ERROR
    return code or 0
