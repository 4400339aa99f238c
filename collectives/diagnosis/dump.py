"""Writes the flight record as text: to this rank's file, and to stderr."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from collectives.diagnosis import stacks
from collectives.diagnosis.record import NUM_SLOTS, Operation, last_operations, newest_operations, open_operations
from collectives.files import partial_of, write_new

NUM_SHOWN = 20  # the newest operations, on stderr
_NUM_BRIEF = 5


class RecordOutput:
    """The rank and the folder of this process's dumps. `world()` sets both, `set_record_folder` the folder."""

    rank = 0
    folder: Path | None = None
    may_write: Callable[[], bool] = staticmethod(lambda: True)


def set_record_folder(folder: str | Path | None, may_write: Callable[[], bool] = lambda: True) -> None:
    """Write dumps of the flight record also to `rank-N.txt` in this folder. None: only to stderr. Default: MPITRAIN_RECORD_DIR.

    `may_write`: whether the folder still belongs to this job; if not, no dump is written there. Any thread may call it.
    """
    RecordOutput.folder = None if folder is None else Path(folder)
    RecordOutput.may_write = may_write


def text(why: str, limit: int = NUM_SLOTS) -> str:
    """The record as text: the places of the threads, and the newest `limit` operations."""
    now, operations = time.monotonic(), last_operations()
    lines = [
        f"flight record of rank {RecordOutput.rank}: {why}; {time.strftime('%Y-%m-%d %H:%M:%S')}, "
        f"process {os.getpid()} on {socket.gethostname()}"
    ]
    for one in open_operations():
        doing = f", in {words}" if (words := stacks.doing(one.thread)) else ""
        lines.append(
            f"  now, for {_since(one.begun, now):.1f} s: {described(one)}{doing}, at {stacks.call_site(one.thread)}"
        )
    lines.append(f"  main thread: {stacks.standing(stacks.main_thread())}")
    lines += [f"  {line}" for line in table(operations[-limit:], now)]
    if len(operations) > limit:
        lines.append(
            f"  ({len(operations) - limit} earlier operations: set MPITRAIN_RECORD_DIR to write all of them to a file)"
        )
    return "\n".join(lines) + "\n"


def brief(now: float) -> str:
    """The newest operations, and those in which a thread has been for a second. Cheap, for a call twice a second."""
    lines = [
        f"in {described(one)}, for {_since(one.begun, now):.1f} s, at {stacks.call_site(one.thread)}"
        for one in open_operations(begun_before=now - 1.0)
    ]
    return "\n".join([*lines, *table(newest_operations(_NUM_BRIEF), now)])


def table(operations: Sequence[Operation], now: float) -> list[str]:
    """One line per operation, oldest first."""
    if not operations:
        return ["no operation yet"]
    rows = [f"{'begun':>13}  {'took':>9}  state   operation"]
    for one in operations:
        took = f"{_since(one.begun, one.ended) * 1e3:6.1f} ms" if one.ended else ""
        rows.append(f"{_since(one.begun, now):7.1f} s ago  {took:>9}  {one.state:<6}  {described(one)}")
    return rows


def _since(begun: float, now: float) -> float:
    """Seconds, at least 0: an operation may have begun after the clock was read."""
    return max(now - begun, 0.0)


def described(operation: Operation) -> str:
    """The operation with its communicator and its algorithm."""
    by = f" by {operation.algorithm}" if operation.algorithm else ""
    return f"{operation.log}: {operation.call}{by}"


def write_file(why: str) -> bool:
    """Write the whole record and the stacks of all threads to this rank's file if there is a folder. Does not raise OSError.

    Returns whether it has printed a line instead, because it cannot.
    """
    if RecordOutput.folder is None or not RecordOutput.may_write():
        return False
    stacks_text = "".join(
        f"\nthread {thread.name}:\n{stacks.stack(thread.ident or 0)}" for thread in threading.enumerate()
    )
    file = RecordOutput.folder / f"rank-{RecordOutput.rank}.txt"
    try:
        RecordOutput.folder.mkdir(parents=True, exist_ok=True)
        partial = partial_of(file, sweeps=False)
        write_new(partial, (text(why) + stacks_text).encode(errors="backslashreplace"))
        partial.replace(file)
    except OSError as error:
        say(
            f"cannot write the flight record to {file} ({error.strerror}); set MPITRAIN_RECORD_DIR to a writable folder"
        )
        return True
    return False


def dump(why: str) -> None:
    """Write the record to this rank's file, and its newest operations to stderr."""
    write_file(why)
    say(text(why, NUM_SHOWN))


def say(lines: str) -> None:
    """Print to stderr in one write, each line with this rank's number."""
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"[rank {RecordOutput.rank}] {line}\n" for line in lines.splitlines()))
        sys.stderr.flush()
