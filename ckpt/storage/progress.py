"""How far something long has come: a function that is told of each so many bytes more."""

from collections.abc import Callable

Progress = Callable[[int], None]


def no_progress(nbytes: int) -> None:
    """Nobody wants to know."""
