"""`python -m ckpt COMMAND`: look at checkpoints and look after them, without MPI, and without torch but for torch's own files."""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from ckpt.commands import diff, gc, ls, show, verify
from ckpt.commands.terminal import UsageError
from ckpt.manifest import CheckpointError

COMMANDS: tuple[ModuleType, ...] = (ls, show, diff, verify, gc)  # in the order of --help
ERROR = 2  # the exit code of all that could not be done; 1 is an answer, as GNU diff's: "they differ"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, a command's own 1, or 2 after one line about what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m ckpt", description="Look at checkpoints and look after them; needs neither MPI nor torch."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    args = parser.parse_args(argv)
    try:
        code: int | None = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not try to flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, CheckpointError, OSError) as error:
        print(f"ckpt: {error}", file=sys.stderr)
        return ERROR
    except RecursionError:
        print("ckpt: the checkpoint's meta is nested too deeply", file=sys.stderr)
        return ERROR
    return code or 0
