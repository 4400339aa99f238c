"""Ends the job if an error ends a rank, and prints the error with the rank. The error's message is the rank's last text.

The rank's last operations come before the traceback, and only if a thread of the program was in an operation: those of a rank whose
program has failed elsewhere say nothing about the error.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from collectives.diagnosis import dump, oom, record, stacks
from collectives.diagnosis.ending import abort_job, claim, leave_alone
from collectives.diagnosis.failure import write_failure
from collectives.diagnosis.job import Job
from collectives.diagnosis.ring import goodbye
from collectives.diagnosis.together import on_all_ranks
from collectives.texts import without_secrets

NUM_SHOWN = 5

_leaving_together = False


class OtherRanks:
    """Prints the places of all ranks. The monitor sets it."""

    show: Callable[[], None] | None = None


def show_all_ranks(error: BaseException) -> None:
    """Let the report of this error, if it ends the job, show the places of the other ranks, which may wait for this one."""
    error._shows_all_ranks = True  # type: ignore[attr-defined]


def leave_together() -> None:
    """Announce that all ranks will end now, with any exit code, so that no rank ends the other ranks."""
    global _leaving_together
    _leaving_together = True
    goodbye.say()


def ends_well() -> bool:
    """Whether the program ends without an uncaught error and without a call of `leave_together`."""
    return not hasattr(sys, "last_value") and not _leaving_together


def how_ended() -> str:
    """How this rank's program ends, as text. Python does not show whether it was a SystemExit, nor its code."""
    error = getattr(sys, "last_value", None)
    return f"an uncaught {type(error).__name__}" if error is not None else "the script returned, or raised SystemExit"


def abort_on_uncaught(mpi: Any) -> None:
    """Let an uncaught exception on one rank print its rank and traceback and end the whole job with exit code 1.

    Otherwise the other ranks would wait forever in their next collective. The rank's flight record is written to its file, if it has
    one. If all ranks have raised the error together, one rank prints it, and all ranks end by themselves with exit code 1. Then the
    program's earlier hook, `sys.excepthook` or `threading.excepthook`, is called. A forked child only has the earlier hooks. In a job
    of one rank the error is only written to the failure file, before Python prints it.
    """

    def others_go_on() -> bool:
        return Job.survives and (Job.mpi is None or Job.mpi.size > 1)

    def report(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, *operations: str
    ) -> str:
        """Print the error, and write it to the failure file. Returns the error's message."""
        rank = mpi.rank if Job.mpi is None else Job.mpi.rank
        who = f"rank {rank} on {socket.gethostname()} (process {os.getpid()})"
        more = [
            each for each in (*operations, oom.note()) if each
        ]  # before the traceback, so that the message is the last line
        lines = [f"{who} ends by an uncaught {kind.__name__}\n", *(f"  {line}\n" for line in more)]
        text = without_secrets("".join([*lines, *traceback.format_exception(kind, error, trace)]))
        sys.stdout.flush()
        say(rank, text)
        if error is None or on_all_ranks(error) or not others_go_on():
            write_failure(text)
        return without_secrets("".join(traceback.format_exception_only(kind, error)))

    def say(rank: int, text: str) -> None:
        lines = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
        print(lines, file=_stderr(), end="", flush=True)

    def end_job(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, hook: Callable[[], None]
    ) -> None:
        claim()
        message = report(kind, error, trace, *_operations(error))
        says_more = dump.write_file(f"ended by {kind.__name__}")
        if OtherRanks.show is not None and getattr(error, "_shows_all_ranks", False):
            OtherRanks.show()
            says_more = True
        if says_more:
            say(dump.RecordOutput.rank, message)  # again: it is the last text
        try:
            hook()
        except Exception:
            traceback.print_exc(file=_stderr())
        finally:
            leave_alone(f"has ended by an uncaught {kind.__name__}") if others_go_on() else abort_job(1)

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        def hook() -> None:
            if before is not sys.__excepthook__:
                before(kind, error, trace)

        if os.getpid() != process:
            before(kind, error, trace)
        elif not on_all_ranks(error):
            end_job(kind, error, trace, hook)
        else:
            message = report(kind, error, trace) if error._speaks_for_all else ""  # type: ignore[attr-defined]
            if dump.write_file(f"ended by {kind.__name__} on all ranks"):
                say(dump.RecordOutput.rank, message)
            hook()

    def on_thread_exception(args: threading.ExceptHookArgs) -> None:
        def hook() -> None:
            if thread_before is not threading.__excepthook__:
                thread_before(args)

        if issubclass(args.exc_type, SystemExit):  # ends only its thread, as in Python's own hook
            hook()
        elif os.getpid() != process:
            thread_before(args)
        else:
            end_job(args.exc_type, args.exc_value, args.exc_traceback, hook)

    def on_exception_alone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == process:
            text = "".join(traceback.format_exception(kind, error, trace))
            write_failure(text)
            if before is sys.__excepthook__ and (public := without_secrets(text)) != text:
                print(public, file=_stderr(), end="", flush=True)
                return
        before(kind, error, trace)

    process = os.getpid()
    before, thread_before = sys.excepthook, threading.excepthook
    if mpi.size == 1:  # no other rank waits
        sys.excepthook = on_exception_alone
        return
    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception


def _operations(error: BaseException | None) -> list[str]:
    """The last operations as lines, if the error came out of an operation, or another thread of the program is in one."""
    newest = record.newest_operations(NUM_SHOWN)
    failed = _left_package(error) and any(each.state in (record.BEGUN, record.FAILED) for each in newest)
    here = threading.get_ident()
    program = {each.ident for each in threading.enumerate() if not each.name.startswith("collectives-")} - {here}
    if failed or any(each.thread in program for each in record.open_operations()):
        return ["its last operations:", *dump.table(newest, time.monotonic())]
    return []


def _left_package(error: BaseException | None) -> bool:
    """Whether the error, or an error before it that it names, has left a function of this package."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(stacks.is_of_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _stderr() -> Any:
    """The stream for the last messages: sys.stderr only if it is a file. torch.distributed replaces it by a buffer, which is lost."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return sys.__stderr__
    return sys.stderr
