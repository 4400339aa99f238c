"""Raises an error of some ranks on all ranks."""

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from collectives.diagnosis.job import all_ranks
from collectives.diagnosis.record import Log


def on_all_ranks(error: BaseException) -> bool:
    """Whether every rank has raised this error (see `Communicator.together`): then one rank can print it, and all ranks can end."""
    return getattr(error, "_raised_on_all_ranks", False)


@contextmanager
def together(mpi: Any, doing: str, log: Log | None = None) -> Iterator[None]:
    """Raise an exception that leaves the block on any rank of `mpi` on every rank, with the same type and text.

    The block must not contain a collective, because a rank that raises would miss it. `log` records the wait for the other ranks at
    the block's end; the block itself is not recorded, so the deadline does not limit it.
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
    """`together` for any group of ranks. `gather(report)`: the reports of all ranks; `mark(error, speaker)`: the error to raise."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    reports = gather(None if error is None else report_of(error))
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
"""An error: its type's module, its type's name, its text."""


def report_of(error: Exception, what: str = "") -> Report:
    """What a rank tells of its error. `what`: words before the error's own text."""
    try:
        text = str(error)
    except Exception as failure:  # other ranks wait for the report
        text = f"an error without a text, whose __str__ raises {type(failure).__name__}"
    return type(error).__module__, type(error).__qualname__, f"{what}: {text}" if what else text


def raised_on(mpi: Any, error: Exception, speaker: int) -> Exception:
    """Mark an error that all ranks of `mpi` raise. Only if these are all ranks of the job, the error need not end other ranks.

    `speaker`: the rank that prints its traceback.
    """
    error._raised_on_all_ranks = mpi.size == all_ranks().size  # type: ignore[attr-defined]
    error._num_raised = mpi.size  # type: ignore[attr-defined]
    error._speaks_for_all = mpi.rank == speaker  # type: ignore[attr-defined]
    return error


def is_joint(error: BaseException, num_ranks: int) -> bool:
    """Whether so many ranks raise this error together; `on_all_ranks` asks whether all ranks of the job do."""
    return getattr(error, "_num_raised", 0) == num_ranks


def share(comm: Any, error: Exception | None, speaker: int) -> Exception:
    """Make an error, which some ranks of `comm` raise together, an error of all its ranks. Collective; returns the error to raise.

    `error`: None on the ranks that do not raise it yet. `speaker`: a rank that raises it.
    """
    report: Report = comm.broadcast_object(None if error is None else report_of(error), speaker)
    return raised_on(comm.mpi, _make(*report), speaker)


def _make(module: str, name: str, text: str) -> Exception:
    """An exception of the named type; RuntimeError if this rank does not have the type or it needs other arguments."""
    kind = getattr(sys.modules.get(module, builtins), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(Exception):
            made = kind(text)
            str(made)  # may raise
            return made
    return RuntimeError(f"{name}: {text}")
