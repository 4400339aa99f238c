"""Errors that concern more than one rank, raised on all of them together."""

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from collectives.diagnosis.record import Log


def on_all_ranks(error: BaseException) -> bool:
    """Whether every rank raised this error (see `Communicator.together`): one of them may print it and all may leave in peace."""
    return getattr(error, "_raised_on_all_ranks", False)


@contextmanager
def together(mpi: Any, doing: str, log: Log | None = None) -> Iterator[None]:
    """An exception that leaves the block on any rank of `mpi` leaves it on every rank, of the same type and with the same text.

    The block must hold no collective: a rank that raises would not take part in it. `log`: where the wait for the others at the
    block's end is recorded; the block itself may take as long as it likes.
    """

    def gather(report: Report | None) -> list[Report | None]:
        with log.enter("together") if log is not None else nullcontext():
            reports: list[Report | None] = mpi.allgather(report)
            return reports

    with joined(gather, doing, partial(raised_on, mpi)):
        yield


@contextmanager
def joined(
    gather: "Callable[[Report | None], Sequence[Report | None]]",
    doing: str,
    mark: Callable[[Exception, int], Exception] = lambda error, speaker: error,
) -> Iterator[None]:
    """What `together` is, over any ranks. `gather`: what each rank reports, on all; `mark(error, speaker)`: what is raised of it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    found = joint_error(gather(report_of(error)), doing)
    if found is not None:
        raise mark(*found) from error


Report = tuple[str, str, str]
"""An error in words: its type's module and name, its text."""


def report_of(error: Exception | None) -> Report | None:
    """What the other ranks are told of an error."""
    return None if error is None else (type(error).__module__, type(error).__qualname__, str(error))


def joint_error(reports: Sequence[Report | None], doing: str) -> tuple[Exception, int] | None:
    """The error that all ranks raise, and the rank whose it was first; None if there was none on any."""
    failed = [rank for rank, report in enumerate(reports) if report]
    if not failed:
        return None
    module, name, text = reports[failed[0]]  # type: ignore[misc]
    others = {report[2] for report in reports if report} - {text}
    who = (
        ""
        if len(failed) == len(reports)
        else f" [rank {', '.join(map(str, failed[:8]))}{', ...' if failed[8:] else ''} of {len(reports)}]"
    )
    more = f" (and {len(others)} other error{'s' * (len(others) > 1)})" if others else ""
    return _make(module, name, f"{doing}: {text}{more}{who}" if doing else f"{text}{more}{who}"), failed[0]


def raised_on(mpi: Any, error: Exception, speaker: int) -> Exception:
    """Mark an error that all ranks of `mpi` raise; where these are only some of the job's, the others must still hear of it.

    `speaker`: the rank whose traceback tells most.
    """
    from mpi4py import MPI

    error._raised_on_all_ranks = mpi.size == MPI.COMM_WORLD.size  # type: ignore[attr-defined]
    error._speaks_for_all = mpi.rank == speaker  # type: ignore[attr-defined]
    return error


def _make(module: str, name: str, text: str) -> Exception:
    """An exception of the named type, or RuntimeError where this rank does not know it or it takes other arguments."""
    kind = getattr(sys.modules.get(module, builtins), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(Exception):
            return kind(text)
    return RuntimeError(f"{name}: {text}")
