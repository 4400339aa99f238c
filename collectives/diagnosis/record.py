"""The flight record: the last operations of this process on all its communicators. Always on; text is made only when it is asked for.

`Log.enter` writes an entry into a ring of slots, `Entry.leave` its end: no locks, no formatting, half a microsecond for both.
`with log.enter(...):` does both and marks an operation that an exception has left. Threads share the record: taking a number and
storing into a slot are each one step of the interpreter.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count as counter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from collectives.diagnosis import stacks

NUM_SLOTS = 256  # a power of two
NUM_SHOWN = 20  # of them, where only the newest are shown

# States of an operation. ISSUED: under way, but nobody waits for it (`async_op=True` before `wait()`).
ISSUED, BEGUN, ENDED, FAILED = "issued", "begun", "ended", "failed"


class Operation(NamedTuple):
    """An entry, by name. Times are those of `time.monotonic`, in seconds; 0 where they are yet to come."""

    number: int  # in order of entering, of this process
    log: "Log"
    sequence: int  # of its communicator: the same on all its ranks. 0 between two ranks
    name: str
    elements: int
    dtype: str
    op: str | int | None  # between two ranks: the tag
    root: int | None  # between two ranks: the peer
    algorithm: str
    state: str
    thread: int
    begun: float
    ended: float

    @property
    def words(self) -> str:
        """The call in words that are the same on all ranks that make the same one."""
        words = [f"{self.elements} x {self.dtype}"] if self.dtype else []
        if self.sequence == 0:
            words += [f"peer={self.root}", f"tag={self.op}"]
        else:
            words += [f"{key}={value}" for key, value in (("op", self.op), ("root", self.root)) if value is not None]
        return f"{self.name}({', '.join(words)})" if words else self.name

    @property
    def call(self) -> str:
        """`words` with the number of the call on its communicator."""
        return f"#{self.sequence} {self.words}" if self.sequence else self.words


_LOG, _NAME, _ALGORITHM, _STATE, _THREAD, _BEGUN, _ENDED = (
    Operation._fields.index(name) for name in ("log", "name", "algorithm", "state", "thread", "begun", "ended")
)

_slots: list["Entry | None"] = [None] * NUM_SLOTS
_open: dict[int, "Entry"] = {}  # the BEGUN ones, by number: also those that the ring has overtaken
_next_number = counter().__next__
_now, _this_thread = time.monotonic, threading.get_ident


class Entry(list[Any]):
    """One operation under way, as `Operation` names its fields. A list, because filling one is what costs least."""

    __slots__ = ()

    def leave(self, state: str = ENDED) -> None:
        """The operation has ended."""
        self[_STATE] = state
        self[_ENDED] = _now()
        _open.pop(self[0], None)

    def fail(self) -> None:
        """An exception leaves the operation."""
        if self[_STATE] == BEGUN:
            self.leave(FAILED)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """The operation goes on after the block, unless an exception leaves it there."""
        try:
            yield
        except BaseException:
            self.fail()
            raise

    def issued(self) -> None:
        """The operation goes on by itself: from here on nobody waits in it, until `wait`."""
        self[_STATE] = ISSUED
        _open.pop(self[0], None)

    def wait(self) -> None:
        """The calling thread begins to wait for an issued operation, or to carry it out."""
        self[_STATE] = BEGUN
        self[_THREAD] = _this_thread()
        self[_BEGUN] = _now()
        _open[self[0]] = self

    def by(self, algorithm: str) -> None:
        """Note the algorithm, where it was not known when the operation was entered."""
        self[_ALGORITHM] = algorithm

    @property
    def algorithm(self) -> str:
        """The one that was chosen."""
        return self[_ALGORITHM]

    @property
    def name(self) -> str:
        """Of the operation."""
        return self[_NAME]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `Log.enter` was called with, and the algorithm."""
        return tuple(self[_NAME : _ALGORITHM + 1])

    @property
    def log(self) -> "Log":
        """The record of its communicator."""
        return self[_LOG]

    @property
    def operation(self) -> Operation:
        """Its fields, by name."""
        return Operation(*self)

    def __enter__(self) -> "Entry":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and kind.__module__ == "mpi4py.MPI":
            error.add_note(
                "Perhaps the ranks called different collectives, or with other sizes: MPITRAIN_DEBUG=1 compares them."
            )
        self[_STATE] = ENDED if kind is None else FAILED
        self[_ENDED] = _now()
        _open.pop(self[0], None)


class Log:
    """The record of one communicator. All its ranks make it, and enter its collectives, in the same order.

    `ranks`: its ranks' numbers in the whole job. `name`: what it is called in reports; it may be set later.
    """

    _made: dict[tuple[int, ...], int] = {}  # noqa: RUF012 - how many so far over the same ranks

    def __init__(self, ranks: Sequence[int], name: str = "") -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.sequence = 0
        nth = self._made.get(self.ranks, 0)
        self._made[self.ranks] = nth + 1
        # The n-th communicator over just these ranks: the same one on each of them.
        self.key = f"{nth} of {shown_ranks(self.ranks, limit=len(self.ranks))}"
        self._nth = nth
        # Checked mode: whether this rank waits for the others' fingerprints, and the error that ends that wait.
        self.comparing = False
        self.verdict: str | None = None

    def __str__(self) -> str:
        return f"{self.name or f'group {self._nth}'} ({shown_ranks(self.ranks)})"

    def enter(
        self,
        name: str,
        elements: int = 0,
        dtype: str = "",
        op: str | None = None,
        root: int | None = None,
        algorithm: str = "",
    ) -> Entry:
        """This thread enters a collective. End it by `leave` or `fail`, or use it in a `with`."""
        self.sequence = sequence = self.sequence + 1
        number = _next_number()
        entry = Entry(
            (number, self, sequence, name, elements, dtype, op, root, algorithm, BEGUN, _this_thread(), _now(), 0.0)
        )
        _slots[number % NUM_SLOTS] = _open[number] = entry
        return entry

    def enter_pair(self, name: str, peer: int, tag: int, elements: int = 0, dtype: str = "") -> Entry:
        """This thread enters an operation with rank `peer` of this communicator alone."""
        number = _next_number()
        entry = Entry((number, self, 0, name, elements, dtype, tag, peer, "", BEGUN, _this_thread(), _now(), 0.0))
        _slots[number % NUM_SLOTS] = _open[number] = entry
        return entry

    def awaited(self, operation: Operation) -> tuple[int, ...]:
        """The ranks of the job that take part in an operation of this communicator."""
        return self.ranks if operation.sequence or operation.root is None else (self.ranks[operation.root],)


def shown_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """Such as "rank 3" or "ranks 0-3, 6": at most `limit` runs of them."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs[:limit]]
    more = f", ... ({len(ranks)} in all)" if len(runs) > limit else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(words)}{more}"


def last_operations() -> list[Operation]:
    """What the record holds, oldest first."""
    return sorted((Operation(*entry) for entry in list(_slots) if entry is not None), key=lambda each: each.number)


def open_entries() -> list[Entry]:
    """The operations in which a thread of this process is now, oldest first."""
    # `copy` is one step of the interpreter. An entry whose exception nobody reported is closed here: its thread is elsewhere.
    entries = sorted(_open.copy().values(), key=lambda entry: entry[0])
    for entry in entries:
        if not stacks.inside_package(entry[_THREAD]):
            entry.fail()
    return [entry for entry in entries if entry[_STATE] == BEGUN]


def open_operations() -> list[Operation]:
    """`open_entries`, by name."""
    return [Operation(*entry) for entry in open_entries()]


class Place:
    """Where this process's record goes: set once by `world()`, the folder also by `set_record_folder`."""

    rank = 0
    folder: Path | None = None


def set_record_folder(folder: str | Path | None) -> None:
    """Write dumps of the flight record to `rank-N.txt` in this folder too. None: to stderr only. MPITRAIN_RECORD_DIR is the default."""
    Place.folder = None if folder is None else Path(folder)


def text(why: str, limit: int = NUM_SLOTS) -> str:
    """The record in words: where the threads stand, and the newest `limit` operations."""
    now, operations = time.monotonic(), last_operations()
    lines = [
        f"flight record of rank {Place.rank}: {why}; {time.strftime('%Y-%m-%d %H:%M:%S')}, "
        f"process {os.getpid()} on {socket.gethostname()}"
    ]
    for one in open_operations():
        lines.append(f"  now, for {now - one.begun:.1f} s: {described(one)}, at {stacks.call_site(one.thread)}")
    lines.append(f"  main thread: {stacks.standing(_main_thread())}")
    lines += [f"  {line}" for line in table(operations[-limit:], now)]
    if len(operations) > limit:
        lines.append(f"  ({len(operations) - limit} earlier ones: set MPITRAIN_RECORD_DIR to have them all in a file)")
    return "\n".join(lines) + "\n"


def table(operations: Sequence[Operation], now: float) -> list[str]:
    """One line per operation, oldest first."""
    if not operations:
        return ["no operation yet"]
    rows = [f"{'begun':>9}  {'took':>9}  state   operation"]
    for one in operations:
        took = f"{(one.ended - one.begun) * 1e3:6.1f} ms" if one.ended else ""
        rows.append(f"{one.begun - now:7.1f} s  {took:>9}  {one.state:<6}  {described(one)}")
    return rows


def described(operation: Operation) -> str:
    """The operation with its communicator and its algorithm."""
    by = f" by {operation.algorithm}" if operation.algorithm else ""
    return f"{operation.log}: {operation.call}{by}"


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def write_file(why: str) -> None:
    """Write the whole record, and the stacks of all threads, to this rank's file if there is a folder. Raises nothing."""
    if Place.folder is None:
        return
    stacks_text = "".join(
        f"\nthread {thread.name}:\n{stacks.stack(thread.ident or 0)}" for thread in threading.enumerate()
    )
    with suppress(OSError):
        Place.folder.mkdir(parents=True, exist_ok=True)
        file = Place.folder / f"rank-{Place.rank}.txt"
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(text(why) + stacks_text)
        partial.replace(file)


def dump(why: str) -> None:
    """The record to this rank's file, and its newest operations to stderr."""
    write_file(why)
    say(text(why, NUM_SHOWN))


def say(lines: str) -> None:
    """Print to stderr in one piece, each line with this rank."""
    with suppress(OSError, ValueError):
        sys.stderr.write("".join(f"[rank {Place.rank}] {line}\n" for line in lines.splitlines()))
        sys.stderr.flush()
