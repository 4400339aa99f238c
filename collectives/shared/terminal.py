"""Functions of all commands: parsers of arguments, and output on one rank only."""

import argparse
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from rich.console import Console, RenderableType

import collectives
from collectives.launcher import is_live_terminal, launched_rank

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_FILE_WIDTH = 240  # characters of a line in a file or a pipe


class UsageError(ValueError):
    """The user's request cannot be carried out; the text is the whole message."""


def or_usage_error(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` for argparse, which shows only the text of an ArgumentTypeError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def several_ranks(command: str) -> collectives.Communicator:
    """The world communicator; UsageError if it has only one rank."""
    comm = collectives.world()
    if comm.size == 1:
        raise UsageError(f"{command} needs at least two ranks: mpirun -np 2 python -m collectives {command}")
    return comm


def print_once(*shown: RenderableType, stderr: bool = False) -> None:
    """Print on rank 0. Collective under a launcher; without one no MPI is used.

    Returns on all ranks after the output, because a launcher ends the job as soon as one rank has ended with an error.
    """
    comm = collectives.world() if launched_rank() >= 0 else None
    if comm is None or comm.rank == 0:
        console(stderr).print(*shown, sep="\n")
    if comm is not None:
        comm.barrier()


def console(stderr: bool = False) -> Console:
    """The console for output: with colours and the terminal's width on a terminal, else with long lines."""
    live = is_live_terminal()
    width = None if live or stderr else _FILE_WIDTH
    return Console(
        stderr=stderr, soft_wrap=stderr, highlight=False, force_terminal=None if stderr else live, width=width
    )
