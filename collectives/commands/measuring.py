"""What the commands that measure share."""

import argparse
from collections.abc import Callable, Sequence

import collectives
from collectives.commands.terminal import UsageError
from collectives.communicator.communicator import Communicator


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, such as 0.5")
    return seconds


def names_of(known: Sequence[str], *, all_of_them: bool = False) -> Callable[[str], list[str]]:
    """For argparse: 'a,b' as a list of names among `known`, each once; with `all_of_them` also 'all'."""

    def parsed(text: str) -> list[str]:
        if all_of_them and text == "all":
            return list(known)
        names = list(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in names:
            if name not in known:
                more = ", or all" if all_of_them else ""
                raise argparse.ArgumentTypeError(f"invalid choice: {name!r}; expected of {', '.join(known)}{more}")
        return names

    return parsed


def several_ranks(command: str) -> Communicator:
    """The world communicator; UsageError if it has one rank alone."""
    comm = collectives.world()
    if comm.size == 1:
        raise UsageError(f"{command} needs at least two ranks: mpirun -np 2 python -m collectives {command}")
    return comm


def writable(comm: Communicator, *files: str | None) -> None:
    """OSError on all ranks if rank 0 cannot write one of `files`: found now rather than when all is measured."""
    with comm.together():
        if comm.rank == 0:
            for file in filter(None, files):
                open(file, "a").close()
