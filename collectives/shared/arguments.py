"""The arguments that all measuring commands share."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress


def positive_seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, such as 0.5")


def names_of(known: Sequence[str], *, or_all: bool = False, or_none: bool = False) -> Callable[[str], list[str]]:
    """A parser for argparse: 'a,b' as a list of names of `known`, each once; with `or_all` also 'all', with `or_none` also ''."""

    def parsed(text: str) -> list[str]:
        if or_all and text == "all":
            return list(known)
        names = list(dict.fromkeys(part.strip() for part in text.split(","))) if text or not or_none else []
        for name in names:
            if name not in known:
                more = ", or all" if or_all else ""
                raise argparse.ArgumentTypeError(f"invalid choice: {name!r}; expected of {', '.join(known)}{more}")
        return names

    return parsed


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json."""
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")


def add_plot(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Add the option --plot."""
    parser.add_argument(
        "--plot", metavar="FILE.png", help=f"also draw {drawn} (needs matplotlib, pip install mpitrain[plot])"
    )


def add_report(parser: "argparse.ArgumentParser | argparse._MutuallyExclusiveGroup") -> None:
    """Add the option --report."""
    parser.add_argument(
        "--report",
        nargs="+",
        metavar="FILE",
        help="measure nothing; report medians over the launches of these --json files (no mpirun)",
    )
