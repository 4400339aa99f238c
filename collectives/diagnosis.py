"""Errors that concern more than one rank: raised on all of them together, or ending the job with a name."""

import builtins
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn


def on_all_ranks(error: BaseException) -> bool:
    """Whether every rank raised this error (see `Communicator.together`): one of them may print it and all may leave in peace."""
    return getattr(error, "_raised_on_all_ranks", False)


@contextmanager
def together(mpi: Any, doing: str) -> Iterator[None]:
    """An exception that leaves the block on any rank of `mpi` leaves it on every rank, of the same type and with the same text.

    The block must hold no collective: a rank that raises would not take part in it.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    reports = mpi.allgather(None if error is None else (type(error).__module__, type(error).__qualname__, str(error)))
    failed = [rank for rank, report in enumerate(reports) if report]
    if not failed:
        return
    module, name, text = reports[failed[0]]
    others = {reports[rank][2] for rank in failed} - {text}
    who = (
        ""
        if len(failed) == mpi.size
        else f" [rank {', '.join(map(str, failed[:8]))}{', ...' if failed[8:] else ''} of {mpi.size}]"
    )
    more = f" (and {len(others)} other error{'s' * (len(others) > 1)})" if others else ""
    joint = _make(module, name, f"{doing}: {text}{more}{who}" if doing else f"{text}{more}{who}")
    raise _raised_on(mpi, joint, speaker=failed[0]) from error


def _raised_on(mpi: Any, error: Exception, speaker: int) -> Exception:
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


def compare_calls(mpi: Any, call: str) -> None:
    """Checked mode: ValueError on all ranks unless `call`, which describes the collective at hand, is the same on all of them."""
    calls = mpi.allgather((call, _call_site()))
    if all(other == call for other, _ in calls):
        return
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, key in enumerate(calls):
        groups.setdefault(key, []).append(rank)
    lines = [f"  rank {', '.join(map(str, ranks))}: {what}  at {site}" for (what, site), ranks in groups.items()]
    text = "the ranks call different collectives, or the same with different arguments:\n" + "\n".join(lines)
    raise _raised_on(mpi, ValueError(text), speaker=0)


def _call_site() -> str:
    """file:line of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_leaving_together = False


def leave_together() -> None:
    """Say that all ranks are about to end, with whatever exit code: none of them is to end the others."""
    global _leaving_together
    _leaving_together = True


class _Exit(SystemExit):
    """A rank that ends by itself with an error ends the job: at the moment when no frame is left that could have caught this."""

    def __init__(self, mpi: Any, code: Any) -> None:
        super().__init__(code)
        self._mpi = mpi

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            # Dropped by the interpreter itself on its way out. A caller that catches it is still there, in a frame.
            shown = f"with exit code {self.code}" if isinstance(self.code, int) else f": {self.code}"
            print(f"[rank {self._mpi.rank}] ended by sys.exit {shown}", file=sys.stderr, flush=True)
            self._mpi.Abort(self.code if isinstance(self.code, int) else 1)


def abort_on_uncaught(mpi: Any) -> None:
    """From now on an uncaught exception on one rank prints its rank and traceback and ends the whole job with exit code 1.

    Otherwise the other ranks would wait for ever in their next collective. So does `sys.exit` with a code other than 0, unless
    `leave_together` was called. An error that all ranks have raised together is printed by one of them, and all end by themselves,
    with exit code 1.
    """

    def report(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        lines = traceback.format_exception(kind, error, trace)
        text = "".join(f"[rank {mpi.rank}] {line}" for chunk in lines for line in chunk.splitlines(keepends=True))
        sys.stdout.flush()
        print(text, file=sys.stderr, end="", flush=True)

    def end_job(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        report(kind, error, trace)
        mpi.Abort(1)

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not on_all_ranks(error):
            end_job(kind, error, trace)
        elif error._speaks_for_all:  # type: ignore[attr-defined]
            report(kind, error, trace)

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:  # which ends its thread alone, as Python's own hook has it
            end_job(args.exc_type, args.exc_value, args.exc_traceback)

    def exit_job(code: Any = None) -> NoReturn:
        # Python calls no hook for SystemExit, and this rank would wait in MPI_Finalize for the others.
        raise _Exit(mpi, code) if code not in (None, 0) and not _leaving_together else SystemExit(code)

    sys.exit = exit_job
    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
