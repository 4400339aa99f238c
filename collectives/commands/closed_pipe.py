"""The end of a command whose reader has closed the pipe, as `| head` does."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from collectives.launcher import launched_rank

CLOSED_PIPE = 128 + signal.SIGPIPE
"""The exit code that shells give to a program that SIGPIPE has ended. Python ignores this signal, because sockets cause it, too."""


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """If nobody reads standard output any more, the block ends at its next output by SystemExit(CLOSED_PIPE), without a message.

    Nothing changes for other broken pipes, nor under a launcher, whose pipe closes only if the job fails.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # rich raises SystemExit(1) in place of the error.
        is_broken = isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)
        if not is_broken or launched_rank() >= 0 or not (isinstance(error, SystemExit) or _is_closed()):
            raise
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(CLOSED_PIPE) from None


def _is_closed() -> bool:
    """Whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported anyway
    return bool(poll.poll(0))
