"""A rank that ends by an error ends the job, with its name and its last operations."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from collectives.diagnosis import child, dump, record
from collectives.diagnosis.ending import abort_job, claim
from collectives.diagnosis.together import on_all_ranks

NUM_SHOWN = 5

_leaving_together = False


def leave_together() -> None:
    """Say that all ranks are about to end, with whatever exit code: none of them is to end the others."""
    global _leaving_together
    _leaving_together = True


def ends_well() -> bool:
    """Whether the program, which is ending, has neither an uncaught error nor called `leave_together`."""
    return not hasattr(sys, "last_value") and not _leaving_together


def how_ended() -> str:
    """Of this rank's program, which is ending, in words. Python tells of no `raise SystemExit`, and not its code."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        return f"an uncaught {type(error).__name__}"
    if _last_exit is not None:
        return f"sys.exit({'' if _last_exit[0] is None else repr(_last_exit[0])})"
    return "its script returned, or raised SystemExit"


class _Exit(SystemExit):
    """Of `sys.exit`: notes that the program ends by it, at the moment when no frame is left that could have caught it."""

    def __init__(self, ends: Callable[[Any], None], code: Any) -> None:
        """`ends(code)`: called at that moment."""
        super().__init__(code)
        self._ends = ends

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            # Dropped by the interpreter itself on its way out. A caller that catches it is still there, in a frame.
            self._ends(self.code)


_last_exit: tuple[Any] | None = None  # the code of the `sys.exit` that has ended the program


def abort_on_uncaught(mpi: Any) -> None:
    """From now on an uncaught exception on one rank prints its rank and traceback and ends the whole job with exit code 1.

    Otherwise the other ranks would wait for ever in their next collective. So does `sys.exit` with a code other than 0, unless
    `leave_together` was called; at `os._exit` mpirun ends the job, and a line says which rank it was. An error that all ranks have
    raised together is printed by one of them, and all end by themselves, with exit code 1. The rank's last operations follow the
    traceback; its flight record goes to its file, if it has one. A hook that the program has set before, `sys.excepthook` or
    `threading.excepthook`, is called after that. In a forked child, which is no rank, all is as it was before; it leaves without
    MPI_Finalize (child.py). A job of one rank ends as any program.
    """

    def report(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        lines = traceback.format_exception(kind, error, trace)
        text = "".join(f"[rank {mpi.rank}] {line}" for chunk in lines for line in chunk.splitlines(keepends=True))
        sys.stdout.flush()
        print(text, file=_stderr(), end="", flush=True)

    def end_job(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, hook: Callable[[], None]
    ) -> None:
        claim()
        report(kind, error, trace)
        if operations := record.last_operations()[-NUM_SHOWN:]:
            lines = dump.table(operations, time.monotonic())
            print("".join(f"[rank {mpi.rank}]   {line}\n" for line in lines), file=_stderr(), end="", flush=True)
        dump.write_file(f"ended by {kind.__name__}")
        try:
            hook()
        except Exception:
            traceback.print_exc(file=_stderr())
        finally:
            abort_job(1)

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        def hook() -> None:
            if before is not sys.__excepthook__:
                before(kind, error, trace)

        if os.getpid() != process:
            before(kind, error, trace)
        elif not on_all_ranks(error):
            end_job(kind, error, trace, hook)
        else:
            if error._speaks_for_all:  # type: ignore[attr-defined]
                report(kind, error, trace)
            dump.write_file(f"ended by {kind.__name__} on all ranks")
            hook()

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        def hook() -> None:
            if thread_before is not threading.__excepthook__:
                thread_before(args)

        if issubclass(args.exc_type, SystemExit):  # ends its thread alone, as Python's own hook has it
            hook()
        elif os.getpid() != process:
            thread_before(args)
        else:
            end_job(args.exc_type, args.exc_value, args.exc_traceback, hook)

    def ends(code: Any) -> None:
        # A rank that ends by itself with an error ends the job.
        global _last_exit
        if _last_exit is not None:
            return  # an earlier one that was caught, and kept as the context of the last
        _last_exit = (code,)
        if code in (None, 0) or _leaving_together or mpi.size == 1 or os.getpid() != process:
            return
        shown = f"with exit code {code}" if isinstance(code, int) else f": {code}"
        print(f"[rank {rank}] ended by sys.exit {shown}, and with it the job", file=sys.stderr, flush=True)
        abort_job(code if isinstance(code, int) else 1)

    def exit_job(code: Any = None) -> NoReturn:
        if threading.get_ident() != threading.main_thread().ident:
            raise SystemExit(code)  # which ends its thread alone
        # Python calls no hook for SystemExit, and this rank would wait in MPI_Finalize for the others.
        raise _Exit(ends, code)

    def exit_at_once(status: int) -> NoReturn:
        # mpirun then ends the job, but not every one says which rank it was. A child process is no rank.
        if os.getpid() == process and not _leaving_together and not MPI.Is_finalized():
            os.write(2, f"[rank {rank}] ended by os._exit with exit code {status}\n".encode())
        leave_at_once(status)

    from mpi4py import MPI

    rank, process = mpi.rank, os.getpid()
    before, thread_before, leave_at_once = sys.excepthook, threading.excepthook, os._exit
    child.leave_before_finalize(lambda: _last_exit)
    sys.exit = exit_job
    if mpi.size > 1:  # else nobody waits, and only a child's end needs care
        os._exit = exit_at_once
        sys.excepthook = on_exception
        threading.excepthook = on_thread_exception


def _stderr() -> Any:
    """Where last words are read. torch.distributed puts a hook around ours that keeps what is written in memory, and dies with it."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return sys.__stderr__
    return sys.stderr
