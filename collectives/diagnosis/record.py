"""The flight record: the last operations of this process on all its communicators. It is always on; dump.py writes it as text.

`Log.enter` stores an entry in a ring of slots, `Entry.leave` notes its end: without locks or formatting, 0.4 us for both.
`with log.enter(...):` does both and marks an operation that an exception has left, for 0.2 us more. Threads share the record without
locks, because the interpreter takes a number and stores to a slot in one step each.
"""

import heapq
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count as counter
from types import TracebackType
from typing import Any, NamedTuple

from collectives.diagnosis import stacks, threads

NUM_SLOTS = 256  # a power of two
_NO_THREAD = -1  # the thread of an operation that never ends: see `Log._refuse_unless_gone`

# States of an operation. ISSUED: unfinished, but no thread waits for it (`async_op=True` before `wait()`).
ISSUED, BEGUN, ENDED, FAILED = "issued", "begun", "ended", "failed"


class Operation(NamedTuple):
    """A snapshot of an entry. Times are those of `time.monotonic`, in seconds; `ended` is 0 before the end."""

    number: int  # in the order in which this process enters its operations
    log: "Log"
    # The number of a collective on its communicator, the same on all ranks; of a message among those with this peer, tag and direction.
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
        """Whether the operation is a message between two ranks."""
        return self.name in ("send", "recv", "isend", "irecv")

    @property
    def words(self) -> str:
        """The call as text, equal on all ranks that make the same call."""
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
    """The record of one operation. `Log` sets its fields, which are those of `Operation`."""

    # There is no __init__: its call would double the time of `enter`.
    __slots__ = ("algorithm", "begun", "call", "ended", "log", "number", "sequence", "state", "thread")

    number: int
    log: "Log"
    sequence: int
    call: Signature

    def leave(self, state: str = ENDED) -> None:
        """Note the end of the operation."""
        self.state = state
        self.ended = _now()

    def fail(self, error: BaseException | None = None) -> None:
        """Note that an exception has left the operation; `error` gets a note if it is an error of MPI."""
        if self.state == BEGUN:
            self.leave(FAILED)
        if error is not None and type(error).__module__ == "mpi4py.MPI":
            error.add_note(
                "Perhaps the ranks called different collectives, or used different sizes: MPITRAIN_DEBUG=1 compares the calls."
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """A block after which the operation goes on; an exception that leaves the block ends the operation."""
        try:
            yield
        except BaseException:
            self.fail()
            raise

    def issued(self) -> None:
        """Note that no thread waits in the operation until `wait`."""
        self.state = ISSUED

    def wait(self) -> None:
        """Note that the calling thread begins to wait for an issued operation, or to carry it out."""
        if self.log.latest is self:
            self.log.latest = _NONE  # its place in the order is fixed, so other threads may enter operations
        self.thread = _this_thread()
        self.begun = _now()
        self.state = BEGUN
        if _slots[self.number % NUM_SLOTS] is not self:
            _keep(self)

    def by(self, algorithm: str) -> None:
        """Note the algorithm, if it was not known at `enter`."""
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
        """A snapshot of the fields."""
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


class KeptEntry(Entry):
    """An entry of the time between `keep_all` and `keep_last`. A wait does not overwrite when the operation was entered."""

    __slots__ = ("entered", "is_issued")

    def __init__(self) -> None:
        self.entered = 0.0
        """The begin of an operation that was issued and for which a thread has waited later; else 0."""
        self.is_issued = False
        """Whether the operation was issued: no thread was in it until `wait`."""
        _kept.append(self)

    def issued(self) -> None:
        self.is_issued = True
        super().issued()

    def wait(self) -> None:
        self.entered = self.entered or self.begun
        super().wait()


_kept: list[KeptEntry] = []
_make: Callable[[], Entry] = Entry  # the class of the next entry: so a trace costs nothing while there is none


def keep_all() -> list[KeptEntry]:
    """Keep each operation from now on, beside the ring. The list grows until `keep_last`, and belongs to the caller."""
    global _kept, _make
    _kept, _make = [], KeptEntry
    return _kept


def keep_last() -> None:
    """Keep the last operations alone, in the ring."""
    global _kept, _make
    _kept, _make = [], Entry


_NONE = Entry()  # stands for the latest entry of a Log without one
_NONE.state = ENDED

_slots: list[Entry | None] = [None] * NUM_SLOTS
_overtaken: list[Entry] = []  # entries that were still BEGUN when the ring reused their slot


def _keep(entry: Entry) -> None:
    """Keep an operation that is BEGUN and has lost its slot."""
    for each in _overtaken.copy():
        if each.state != BEGUN:
            with suppress(ValueError):  # another thread has removed it
                _overtaken.remove(each)
    _overtaken.append(entry)


def _begin(log: "Log", sequence: int, call: Signature, algorithm: str) -> Entry:
    entry = _make()
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
    # No other thread can run between these lines, because they have no call unless an entry is kept.
    last = _slots[slot]
    if last is not None and last.state is BEGUN:
        _keep(last)
    _slots[slot] = entry
    return entry


class Log:
    """The record of one communicator. All its ranks make their Logs, and enter collectives in them, in the same order.

    `ranks`: the numbers of its ranks in the job. `name`: the communicator's name in reports; it may be set later.
    """

    _made: dict[tuple[int, ...], int] = {}  # noqa: RUF012 - the number of Logs made for the same ranks

    def __init__(self, ranks: Sequence[int], name: str = "") -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.sequence = 0
        self.latest = _NONE  # the latest collective
        self._num_messages: dict[tuple[str, int, int], int] = {}  # by direction, peer, tag
        nth = self._made.get(self.ranks, 0)
        self._made[self.ranks] = nth + 1
        # The n-th communicator with exactly these ranks, which is the same one on each of them.
        self.key = f"{nth} of {shown_ranks(self.ranks, limit=len(self.ranks))}"
        self._nth = nth
        _logs[self.key] = self
        # Checked mode: whether this rank waits for the other ranks' fingerprints, and the error that ends this wait.
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
        """Note that this thread enters a collective. The caller ends the entry by `leave` or `fail`, or by a `with`.

        RuntimeError if another thread is inside a collective of this communicator: see threads.py.
        """
        self.sequence = sequence = self.sequence + 1
        entry = _begin(self, sequence, (name, elements, dtype, op, root), algorithm)
        # As in `_begin`, no other thread can run between the next two lines.
        last = self.latest
        self.latest = entry
        if last.state is BEGUN and last.thread != entry.thread:
            self._refuse_unless_gone(last, entry)
        return entry

    def _refuse_unless_gone(self, other: Entry, mine: Entry) -> None:
        """RuntimeError because this thread has entered `mine` while another thread is inside `other`.

        From then on the Log refuses every collective of every thread, because the order of the calls is unknown: otherwise the other
        ranks would wait for the refused call. There is no error if an exception, which was not noted, has left `other`.
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
        """Note that this thread enters a message to or from rank `peer` of this communicator."""
        channel = (name[-4:], peer, tag)
        self._num_messages[channel] = nth = self._num_messages.get(channel, 0) + 1
        return _begin(self, nth, (name, elements, dtype, tag, peer), "")

    def awaited(self, operation: Operation) -> tuple[int, ...]:
        """The ranks of the job that take part in an operation of this communicator."""
        return (self.ranks[operation.root or 0],) if operation.is_pair else self.ranks

    def counter(self, operation: Operation, rank: int) -> str:
        """Its key in the `counts` of the ranks for which `rank` (this one, in the job) waits. Less than `sequence`: not entered yet."""
        if not operation.is_pair:
            return self.key
        return self._channel("recv" if operation.name[-4:] == "send" else "send", rank, operation.op)

    def counts(self) -> dict[str, int]:
        """The number of collectives that this rank has entered here, and of messages by direction, peer and tag."""
        messages = self._num_messages.copy()
        return {self.key: self.sequence} | {
            self._channel(direction, self.ranks[peer], tag): number
            for (direction, peer, tag), number in messages.items()
        }

    def _channel(self, direction: str, peer: int, tag: str | int | None) -> str:
        """The key of messages in `counts`. `peer`: its number in the job."""
        return f"{self.key}: {direction}, {peer}, {tag}"


_logs: weakref.WeakValueDictionary[str, Log] = weakref.WeakValueDictionary()  # the Logs in use, by key


def forget_logs() -> None:
    """Forget all Logs: after a recovery the ranks have new numbers, and the same keys name other communicators.

    Operations that the loss has interrupted end here. Else they would pass the deadline while their thread is in a later operation.
    """
    for entry in _slots.copy() + _overtaken.copy():
        if entry is not None and entry.state in (BEGUN, ISSUED):
            entry.leave(FAILED)
    _overtaken.clear()
    _logs.clear()
    Log._made.clear()


def shown_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    """Ranks as text, such as "rank 3" or "ranks 0-3, 6", with at most `limit` runs of ranks."""
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


def newest_operations(number: int) -> list[Operation]:
    """The newest operations in the record, at most `number`, oldest first."""
    entries = heapq.nlargest(number, (each for each in _slots.copy() if each is not None), key=lambda each: each.number)
    return [entry.operation for entry in reversed(entries)]


def open_operations(*, begun_before: float = math.inf) -> list[Operation]:
    """The operations in which a thread of this process is now, oldest first. `begun_before`: a time of `time.monotonic`.

    The function reads the stacks of the operations' threads. A running thread's frames may disappear meanwhile (torch's compiler clears
    frames that CPython keeps). So a monitor that calls it often passes `begun_before`, to leave out threads that make progress.
    """
    # `copy` is one step of the interpreter, so no other thread changes the list meanwhile.
    entries = {
        entry.number: entry
        for entry in _slots.copy() + _overtaken.copy()
        if entry is not None and entry.state == BEGUN and entry.begun < begun_before
    }
    for entry in entries.values():
        if not stacks.inside_package(entry.thread):
            entry.fail()  # an exception that was not noted has left the operation
    return [entries[number].operation for number in sorted(entries) if entries[number].state == BEGUN]


def counts() -> dict[str, int]:
    """The merged `Log.counts` of all communicators of this process."""
    logs = [log for reference in _logs.valuerefs() if (log := reference()) is not None]
    return {name: number for log in logs for name, number in log.counts().items()}
