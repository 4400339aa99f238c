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
    """`together` over any ranks. `gather(report)`: the reports of all ranks; `mark(error, speaker)`: the error that is raised."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    reports = gather(None if error is None else (type(error).__module__, type(error).__qualname__, str(error)))
    failed = {rank: report for rank, report in enumerate(reports) if report}
    if not failed:
        return
    first, (module, name, text) = next(iter(failed.items()))
    others = {report[2] for report in failed.values()} - {text}
    if others:
        text += f" (and {len(others)} other error{'s' * (len(others) > 1)})"
    if len(failed) < len(reports):
        ranks = [str(rank) for rank in failed]
        text += f" [rank {', '.join(ranks[:8])}{', ...' if ranks[8:] else ''} of {len(reports)}]"
    raise mark(_make(module, name, f"{doing}: {text}" if doing else text), first) from error


Report = tuple[str, str, str]
"""An error in words: its type's module and name, its text."""


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
