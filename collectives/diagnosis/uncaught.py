"""A rank that ends by an error ends the job, with its name and its last operations."""

import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from collectives.diagnosis import dump, record
from collectives.diagnosis.together import on_all_ranks

NUM_SHOWN = 5

_leaving_together = False


def leave_together() -> None:
    """Say that all ranks are about to end, with whatever exit code: none of them is to end the others."""
    global _leaving_together
    _leaving_together = True


def is_leaving_together() -> bool:
    """Whether `leave_together` was called."""
    return _leaving_together


def how_ended() -> str:
    """Of this rank's program, which is ending, in words. Python tells of no `raise SystemExit`, and not its code."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        return f"an uncaught {type(error).__name__}"
    return _last_exit or "its script returned, or raised SystemExit"


_last_exit = ""


class _Exit(SystemExit):
    """Of `sys.exit`: notes that the program ends by it, at the moment when no frame is left that could have caught it.

    A rank that ends by itself with an error then ends the job.
    """

    def __init__(self, mpi: Any, code: Any) -> None:
        super().__init__(code)
        self._mpi = mpi

    def __del__(self) -> None:
        global _last_exit
        try:
            sys._getframe(1)
        except ValueError:
            # Dropped by the interpreter itself on its way out. A caller that catches it is still there, in a frame.
            _last_exit = f"sys.exit({'' if self.code is None else repr(self.code)})"
            if self.code in (None, 0) or _leaving_together:
                return
            shown = f"with exit code {self.code}" if isinstance(self.code, int) else f": {self.code}"
            print(
                f"[rank {self._mpi.rank}] ended by sys.exit {shown}, and with it the job", file=sys.stderr, flush=True
            )
            self._mpi.Abort(self.code if isinstance(self.code, int) else 1)


def abort_on_uncaught(mpi: Any) -> None:
    """From now on an uncaught exception on one rank prints its rank and traceback and ends the whole job with exit code 1.

    Otherwise the other ranks would wait for ever in their next collective. So does `sys.exit` with a code other than 0, unless
    `leave_together` was called; at `os._exit` mpirun ends the job, and a line says which rank it was. An error that all ranks have
    raised together is printed by one of them, and all end by themselves, with exit code 1. The rank's last operations follow the
    traceback; its flight record goes to its file, if it has one.
    """

    def report(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        lines = traceback.format_exception(kind, error, trace)
        text = "".join(f"[rank {mpi.rank}] {line}" for chunk in lines for line in chunk.splitlines(keepends=True))
        sys.stdout.flush()
        print(text, file=sys.stderr, end="", flush=True)

    def end_job(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        report(kind, error, trace)
        if operations := record.last_operations()[-NUM_SHOWN:]:
            lines = dump.table(operations, time.monotonic())
            print("".join(f"[rank {mpi.rank}]   {line}\n" for line in lines), file=sys.stderr, end="", flush=True)
        dump.write_file(f"ended by {kind.__name__}")
        mpi.Abort(1)

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not on_all_ranks(error):
            end_job(kind, error, trace)
        elif error._speaks_for_all:  # type: ignore[attr-defined]
            report(kind, error, trace)
        dump.write_file(f"ended by {kind.__name__} on all ranks")

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:  # which ends its thread alone, as Python's own hook has it
            end_job(args.exc_type, args.exc_value, args.exc_traceback)

    def exit_job(code: Any = None) -> NoReturn:
        # Python calls no hook for SystemExit, and this rank would wait in MPI_Finalize for the others.
        raise _Exit(mpi, code)

    def exit_at_once(status: int) -> NoReturn:
        # mpirun then ends the job, but not every one says which rank it was. A child process is no rank.
        if os.getpid() == process and not _leaving_together and not MPI.Is_finalized():
            os.write(2, f"[rank {rank}] ended by os._exit with exit code {status}\n".encode())
        leave_at_once(status)

    from mpi4py import MPI

    rank, process, leave_at_once = mpi.rank, os.getpid(), os._exit
    sys.exit, os._exit = exit_job, exit_at_once
    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
