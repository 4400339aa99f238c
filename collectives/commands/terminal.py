"""Shared by the commands: parsers of arguments, and printing on one rank alone."""

import argparse
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from rich.console import Console, RenderableType

import collectives
from collectives.launcher import is_live_terminal, launched_rank

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_FILE_WIDTH = 240  # of what goes to a file or a pipe


class UsageError(Exception):
    """The request of the user cannot be carried out; the text is the whole message."""


def or_usage_error(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` for argparse, which keeps the text of an ArgumentTypeError alone."""

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
    """The world communicator; UsageError if it has one rank alone."""
    comm = collectives.world()
    if comm.size == 1:
        raise UsageError(f"{command} needs at least two ranks: mpirun -np 2 python -m collectives {command}")
    return comm


def print_once(*shown: RenderableType, stderr: bool = False) -> None:
    """Print on rank 0. Collective where a launcher has started several ranks, and else done without MPI.

    Returns on all ranks when it is printed: a launcher ends the job as soon as one rank has ended with an error.
    """
    comm = collectives.world() if launched_rank() >= 0 else None
    if comm is None or comm.rank == 0:
        console(stderr).print(*shown, sep="\n")
    if comm is not None:
        comm.barrier()


def console(stderr: bool = False) -> Console:
    """Where to print: with colours on a terminal that a person looks at, and in lines as long as they are elsewhere."""
    live = is_live_terminal()
    width = None if live or stderr else _FILE_WIDTH
    return Console(
        stderr=stderr, soft_wrap=stderr, highlight=False, force_terminal=None if stderr else live, width=width
    )
