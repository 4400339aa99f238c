"""Work on its way to a device: NCCL's calls, ordered among the caller's streams by events, and the errors that come of them.

    caller's stream   ... kernels that write x | record ready |                              | wait for done | kernels that read x
    NCCL's stream                               wait for ready | NCCL's kernel | record done |

Nothing of this blocks the host. With `async_op` the last wait is left to `Handle.wait`, and the caller's kernels overlap NCCL's.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum, auto
from typing import NamedTuple

from collectives.devices import Device
from collectives.dtypes import DType
from collectives.transports.binding import Binding, RawCommunicator
from collectives.transports.lane import Lane

_PAUSE_S = 5e-5  # between two looks at an event

Call = Callable[[], None]


class NcclError(RuntimeError):
    """NCCL failed. The communicator has been aborted, so that no kernel of it waits for ever; it cannot be used again."""


class _What(NamedTuple):
    """An operation, as errors name it."""

    operation: str
    elements: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.operation}({self.elements} x {self.dtype})"


class _State(Enum):
    OPEN = auto()
    ABORTED = auto()
    FREED = auto()


class Handle:
    """An operation on its way. The caller keeps its arrays alive until `wait()`."""

    def __init__(self, queue: "Queue", what: _What, streams: Sequence[int]) -> None:
        self.what = what
        self._queue, self._streams = queue, streams
        self._done: _Event | None = None  # set when it is issued: for operations in a group, at its end

    def wait(self, stream: int | None = None) -> None:
        """What is queued on `stream` (the one of the call if not given) from now on starts after the operation.

        So does what is queued on the streams of the call: an array freed now may be handed out there again. NcclError if an error
        was noticed.
        """
        self._queue._order(self, self._event(), dict.fromkeys([*self._streams, *([] if stream is None else [stream])]))

    def done(self) -> bool:
        """Whether the operation has ended on the device. NcclError if an error was noticed."""
        return self._queue._has_ended(self.what, self._event())

    def _event(self) -> "_Event":
        if self._done is None:
            raise RuntimeError("wait() and done() of an operation in a group come after the group's end")
        return self._done


class _Event:
    """A CUDA event from the communicator's pool, which it returns to when nobody holds it."""

    def __init__(self, number: int, pool: list[int]) -> None:
        self.number, self._pool = number, pool

    def __del__(self) -> None:
        self._pool.append(self.number)


class Underway(NamedTuple):
    """An operation that was issued, and the event that marks its end."""

    what: _What
    event: _Event


class _Operation(NamedTuple):
    """NCCL's calls for one operation, not issued yet."""

    what: _What
    streams: Sequence[int]
    calls: Sequence[Call]
    after: Sequence[Call]  # kernels of our own that follow on NCCL's stream
    handle: Handle | None


class Queue:
    """Issues NCCL's calls for one communicator and device, notices their errors, and ends it. One thread at a time.

    Nothing here knows what an operation does: that is `Nccl`, which this is a part of.
    """

    def __init__(
        self, raw: RawCommunicator, rank: int, size: int, index: int, binding: Binding, lane: Lane, timeout_s: float
    ) -> None:
        self.rank, self.size, self.index = rank, size, index
        self._raw, self._binding, self._lane, self._timeout_s = raw, binding, lane, timeout_s
        self._state, self._why = _State.OPEN, ""
        self._group: list[_Operation] | None = None
        self._last: Underway | None = None  # the operation issued last
        self._bytes = binding.constant("NCCL_UINT8")
        self._pool: list[int] = []  # events to use again
        self._ending = threading.Lock()  # held by another thread that looks, so that it does not end meanwhile
        with binding.device(index):
            self._stream = lane.join(self, binding.stream_create)
            self._ready = binding.event_create()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Operations in the block start together, as one, at its end. An exception in the block: none of them starts."""
        if self._group is not None:
            raise RuntimeError("a group inside a group; end the first one")
        operations: list[_Operation] = []
        self._group = operations
        try:
            yield
        finally:
            self._group = None
        if operations:
            self._issue(operations)

    # Its life

    @property
    def is_over(self) -> bool:
        """Whether it was freed or aborted."""
        return self._state is not _State.OPEN

    def look(self, operation: Underway | None) -> Underway | None:
        """For a thread that watches: `operation` if it has not ended, else the one issued last if that has not; None if it has.

        Raises what went wrong on the device or in the network, and leaves it for its own thread to notice.
        """
        with self._ending:
            if self.is_over:
                return None
            self._raw.check_async_error()
            with self._binding.device(self.index):
                for each in (operation, self._last):
                    if each is not None and not self._binding.event_done(each.event.number):
                        return each
            return None

    def synchronize(self) -> None:
        """Block until all its operations have ended on the device; NcclError if one failed, or takes longer than `timeout_s`."""
        if self._last is None:
            return
        what, event = self._last
        deadline = time.monotonic() + self._timeout_s
        while not self._has_ended(what, event):
            if time.monotonic() > deadline:
                raise self._fail(what, TimeoutError(f"not ended after {self._timeout_s:g} s"))
            time.sleep(_PAUSE_S)

    def abort(self, why: str = "abort() was called") -> None:
        """End it at once, whatever is in flight: for after a failure. Not collective. Idempotent."""
        if self._state is _State.OPEN:
            self._state, self._why = _State.ABORTED, f"was aborted: {why}"
            with suppress(Exception):  # the device may be beyond help; the first error says why
                self._give_back(self._raw.abort)

    def free(self) -> None:
        """Wait for its operations and give it back. Collective. Idempotent."""
        if self._state is _State.OPEN:
            self.synchronize()
            self._state, self._why = _State.FREED, "was freed"
            self._give_back(self._raw.destroy)

    def _give_back(self, end: Call) -> None:
        self._lane.leave(self)
        self._last = None
        with self._ending, self._binding.device(self.index):
            end()
            for event in (self._ready, *self._pool):
                self._binding.event_destroy(event)
            self._pool.clear()

    # For the operations

    def _run(
        self,
        operation: str,
        arrays: Sequence[Device],
        dtype: DType,
        calls: Sequence[Call],
        async_op: bool,
        after: Sequence[Call] = (),
    ) -> Handle | None:
        """Issue an operation, or keep it for the end of the group."""
        for array in arrays:
            if array.index != self.index:
                raise ValueError(
                    f"{operation}: an array is on device {array.index}, but this communicator's NCCL is on device {self.index}"
                )
        streams = tuple(dict.fromkeys(array.stream for array in arrays if array.stream is not None))
        what = _What(operation, arrays[0].nbytes // dtype.itemsize, dtype.name)
        handle = Handle(self, what, streams) if async_op else None
        self._check(what)
        operations = [_Operation(what, streams, calls, after, handle)]
        if self._group is None:
            self._issue(operations)
        else:
            self._group += operations
        return handle

    def _issue(self, operations: Sequence[_Operation]) -> None:
        """Start operations as one, between the callers' streams and an event that marks their end."""
        b, what = self._binding, operations[-1].what
        calls = [call for operation in operations for call in operation.calls]
        with self._lane.nccl(self._timeout_s), b.device(self.index):
            for stream in dict.fromkeys(stream for operation in operations for stream in operation.streams):
                b.event_record(self._ready, stream)
                b.stream_wait(self._stream, self._ready)
            try:
                with self._as_one() if len(calls) > 1 else nullcontext():
                    for call in calls:
                        call()
                for operation in operations:
                    for call in operation.after:
                        call()
            except Exception as error:
                raise self._fail(what, error) from error
            done = _Event(self._pool.pop() if self._pool else b.event_create(), self._pool)
            b.event_record(done.number, self._stream)
            self._last = Underway(what, done)
            for operation in operations:
                if operation.handle is not None:
                    operation.handle._done = done
                else:
                    for stream in operation.streams:
                        b.stream_wait(stream, done.number)

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        self._binding.group_start()
        try:
            yield
        except Exception:
            with suppress(Exception):  # the first error says more
                self._binding.group_end()
            raise
        self._binding.group_end()

    def _order(self, handle: Handle, event: _Event, streams: Iterable[int]) -> None:
        """What is queued on `streams` from now on starts after `event`."""
        if self._state is not _State.FREED:
            self._check(handle.what)
            with self._binding.device(self.index):
                for stream in streams:
                    self._binding.stream_wait(stream, event.number)

    def _has_ended(self, what: _What, event: _Event) -> bool:
        if self._state is _State.FREED:
            return True
        self._check(what)
        try:
            with self._binding.device(self.index):
                return self._binding.event_done(event.number)
        except Exception as error:
            raise self._fail(what, error) from error

    def _check(self, what: _What) -> None:
        """NcclError if the communicator has ended, or an error came up since the last look."""
        if self._state is not _State.OPEN:
            raise NcclError(f"{what}: the NCCL communicator {self._why}")
        try:
            self._raw.check_async_error()
        except Exception as error:
            before = f"noticed at {what}" + (f", after {self._last.what} was started" if self._last else "")
            raise self._fail(before, error) from error

    def _fail(self, where: object, error: Exception) -> NcclError:
        """Abort, and what to raise."""
        text = f"NCCL failed on rank {self.rank} of {self.size}, {where}: {error}"
        self.abort(text)
        return NcclError(f"{text}; its communicator is aborted")
