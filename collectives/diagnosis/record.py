"""The flight record: the last operations of this process on all its communicators. Always on; dump.py makes text of it when asked.

`Log.enter` puts an entry into a ring of slots, `Entry.leave` notes its end: no locks, no formatting, 0.4 us for both.
`with log.enter(...):` does both and marks an operation that an exception has left, for 0.2 us more. Threads share the record: taking a
number and storing into a slot are each one step of the interpreter.
"""

import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count as counter
from types import TracebackType
from typing import Any, NamedTuple

from collectives.diagnosis import stacks, threads

NUM_SLOTS = 256  # a power of two
_NO_THREAD = -1  # the thread of an operation that never ends: see `Log._refuse_unless_gone`

# States of an operation. ISSUED: under way, but no thread waits for it (`async_op=True` before `wait()`).
ISSUED, BEGUN, ENDED, FAILED = "issued", "begun", "ended", "failed"


class Operation(NamedTuple):
    """An entry as it stood when it was asked for. Times are those of `time.monotonic`, in seconds; 0 where they are yet to come."""

    number: int  # in order of entering, of this process
    log: "Log"
    # Of its communicator: the same on all its ranks. Between two ranks: of this rank's with that peer and tag in that direction.
    sequence: int
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
    def is_pair(self) -> bool:
        """Whether it is one between two ranks, a message."""
        return self.name in ("send", "recv", "isend", "irecv")

    @property
    def words(self) -> str:
        """The call in words that are the same on all ranks that make the same one."""
        words = [f"{self.elements} x {self.dtype}"] if self.dtype else []
        if self.is_pair:
            words += [f"peer={self.root}", f"tag={self.op}"]
        else:
            words += [f"{key}={value}" for key, value in (("op", self.op), ("root", self.root)) if value is not None]
        return f"{self.name}({', '.join(words)})" if words else self.name

    @property
    def call(self) -> str:
        """`words` with the number of the call on its communicator."""
        return self.words if self.is_pair else f"#{self.sequence} {self.words}"


Signature = tuple[str, int, str, str | int | None, int | None]  # name, elements, dtype, op, root

_next_number = counter().__next__
_now, _this_thread = time.monotonic, threading.get_ident


class Entry:
    """One operation under way. Its fields, which `Log` sets, are those of `Operation`."""

    # No __init__: calling one would double the time of `enter`.
    __slots__ = ("algorithm", "begun", "call", "ended", "log", "number", "sequence", "state", "thread")

    number: int
    log: "Log"
    sequence: int
    call: Signature

    def leave(self, state: str = ENDED) -> None:
        """The operation has ended."""
        self.state = state
        self.ended = _now()

    def fail(self, error: BaseException | None = None) -> None:
        """An exception leaves the operation."""
        if self.state == BEGUN:
            self.leave(FAILED)
        if error is not None and type(error).__module__ == "mpi4py.MPI":
            error.add_note(
                "Perhaps the ranks called different collectives, or used different sizes: MPITRAIN_DEBUG=1 compares the calls."
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """The operation goes on after the block, unless an exception leaves it there."""
        try:
            yield
        except BaseException:
            self.fail()
            raise

    def issued(self) -> None:
        """The operation goes on by itself: no thread waits in it, until `wait`."""
        self.state = ISSUED

    def wait(self) -> None:
        """The calling thread begins to wait for an issued operation, or to carry it out."""
        if self.log.latest is self:
            self.log.latest = _NONE  # its place in the order was taken when it was issued: other threads may go on
        self.thread = _this_thread()
        self.begun = _now()
        self.state = BEGUN
        if _slots[self.number % NUM_SLOTS] is not self:
            _keep(self)

    def by(self, algorithm: str) -> None:
        """Note the algorithm, where it was not known when the operation was entered."""
        self.algorithm = algorithm

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.call[0]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `Log.enter`, and the algorithm."""
        return (*self.call, self.algorithm)

    @property
    def operation(self) -> Operation:
        """Its fields now."""
        return Operation(
            self.number,
            self.log,
            self.sequence,
            *self.call,
            self.algorithm,
            self.state,
            self.thread,
            self.begun,
            self.ended,
        )

    def __enter__(self) -> "Entry":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.state = ENDED
            self.ended = _now()
        else:
            self.fail(error)


_NONE = Entry()  # before the first one of a Log
_NONE.state = ENDED

_slots: list[Entry | None] = [None] * NUM_SLOTS
_overtaken: list[Entry] = []  # those that were BEGUN when the ring came round to their slot


def _keep(entry: Entry) -> None:
    """Keep an operation that is BEGUN and has no slot any more."""
    for each in _overtaken.copy():
        if each.state != BEGUN:
            with suppress(ValueError):  # another thread has done so
                _overtaken.remove(each)
    _overtaken.append(entry)


def _begin(log: "Log", sequence: int, call: Signature, algorithm: str) -> Entry:
    entry = Entry()
    entry.number = number = _next_number()
    entry.log = log
    entry.sequence = sequence
    entry.call = call
    entry.algorithm = algorithm
    entry.state = BEGUN
    entry.thread = _this_thread()
    entry.begun = _now()
    entry.ended = 0.0
    slot = number % NUM_SLOTS
    # No other thread gets between these lines: no call is among them where nothing is lost.
    last = _slots[slot]
    if last is not None and last.state is BEGUN:
        _keep(last)
    _slots[slot] = entry
    return entry


class Log:
    """The record of one communicator. All its ranks make it, and enter its collectives, in the same order.

    `ranks`: its ranks' numbers in the whole job. `name`: what it is called in reports; it may be set later.
    """

    _made: dict[tuple[int, ...], int] = {}  # noqa: RUF012 - how many so far over the same ranks

    def __init__(self, ranks: Sequence[int], name: str = "") -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.sequence = 0
        self.latest = _NONE  # of its collectives
        self._num_messages: dict[tuple[str, int, int], int] = {}  # by direction, peer, tag
        nth = self._made.get(self.ranks, 0)
        self._made[self.ranks] = nth + 1
        # The n-th communicator over just these ranks: the same one on each of them.
        self.key = f"{nth} of {shown_ranks(self.ranks, limit=len(self.ranks))}"
        self._nth = nth
        _logs[self.key] = self
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
        op: str | int | None = None,
        root: int | None = None,
        algorithm: str = "",
    ) -> Entry:
        """This thread enters a collective. End it by `leave` or `fail`, or use it in a `with`.

        RuntimeError where another thread is inside one: see `threads`.
        """
        self.sequence = sequence = self.sequence + 1
        entry = _begin(self, sequence, (name, elements, dtype, op, root), algorithm)
        # As in `_begin`, no other thread gets between the next two lines.
        last = self.latest
        self.latest = entry
        if last.state is BEGUN and last.thread != entry.thread:
            self._refuse_unless_gone(last, entry)
        return entry

    def _refuse_unless_gone(self, other: Entry, mine: Entry) -> None:
        """RuntimeError: this thread has entered `mine` while another is inside `other`. This Log is lost from then on.

        The order of the calls is not known any more, so the Log refuses each later collective of any thread too: otherwise the
        refused thread's peers would wait for it. An `other` that its thread left by an unreported exception is no reason to refuse.
        """
        lost = other.thread == _NO_THREAD
        if not lost and not stacks.inside_package(other.thread):
            other.fail()
            return
        mine.fail()
        said = other.call[0] if lost else f"{other.call[0]}, at {stacks.call_site(other.thread)}"
        self.latest = last = Entry()
        last.log, last.state, last.thread, last.call = self, other.state, _NO_THREAD, (said, *other.call[1:])
        raise threads.refusal(mine.call[0], str(self), said)

    def enter_pair(self, name: str, peer: int, tag: int, elements: int = 0, dtype: str = "") -> Entry:
        """This thread enters an operation with rank `peer` of this communicator alone."""
        channel = (name[-4:], peer, tag)
        self._num_messages[channel] = nth = self._num_messages.get(channel, 0) + 1
        return _begin(self, nth, (name, elements, dtype, tag, peer), "")

    def awaited(self, operation: Operation) -> tuple[int, ...]:
        """The ranks of the job that take part in an operation of this communicator."""
        return (self.ranks[operation.root or 0],) if operation.is_pair else self.ranks

    def counter(self, operation: Operation, rank: int) -> str:
        """Its name in the `counts` of those that `rank` (this one, of the job) waits for: less there means yet to come."""
        if not operation.is_pair:
            return self.key
        return self._channel("recv" if operation.name[-4:] == "send" else "send", rank, operation.op)

    def counts(self) -> dict[str, int]:
        """How many collectives this rank has entered here, and how many messages from and to each other rank by each tag."""
        messages = self._num_messages.copy()
        return {self.key: self.sequence} | {
            self._channel(direction, self.ranks[peer], tag): number
            for (direction, peer, tag), number in messages.items()
        }

    def _channel(self, direction: str, peer: int, tag: str | int | None) -> str:
        """`peer`: as the job numbers it."""
        return f"{self.key}: {direction}, {peer}, {tag}"


_logs: weakref.WeakValueDictionary[str, Log] = weakref.WeakValueDictionary()  # those in use, by key


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
    """The operations in the record, oldest first."""
    return sorted((entry.operation for entry in _slots.copy() if entry is not None), key=lambda each: each.number)


def open_operations(*, begun_before: float = math.inf) -> list[Operation]:
    """The operations in which a thread of this process is now, oldest first; those begun before that time of `time.monotonic`.

    It looks at the stacks of their threads. Those of running threads may be gone while one looks (torch's compiler clears frames that
    CPython keeps): for a monitor that looks again and again, `begun_before` leaves out the threads that are getting on.
    """
    # `copy` is one step of the interpreter.
    entries = {
        entry.number: entry
        for entry in _slots.copy() + _overtaken.copy()
        if entry is not None and entry.state == BEGUN and entry.begun < begun_before
    }
    for entry in entries.values():
        if not stacks.inside_package(entry.thread):
            entry.fail()  # its thread has left it by an exception that was not reported
    return [entries[number].operation for number in sorted(entries) if entries[number].state == BEGUN]


def counts() -> dict[str, int]:
    """`Log.counts` of all communicators of this process, in one."""
    logs = [log for reference in _logs.valuerefs() if (log := reference()) is not None]
    return {name: number for log in logs for name, number in log.counts().items()}
