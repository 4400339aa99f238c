"""Progress of long work: a function that gets the number of bytes done since its last call."""

from collections.abc import Callable

Progress = Callable[[int], None]


def no_progress(nbytes: int) -> None:
    """The function of a caller that shows no progress."""
