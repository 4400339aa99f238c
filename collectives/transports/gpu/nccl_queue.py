"""Work on its way to a device: NCCL's calls, ordered among the caller's streams by events, and the errors that come of them.

    caller's stream   ... kernels that write x | record ready |                              | wait for done | kernels that read x
    NCCL's stream                               wait for ready | NCCL's kernel | record done |

Nothing of this blocks the host. With `async_op` the last wait is left to `Handle.wait`, and the caller's kernels overlap NCCL's.

[Note: memory] The pools of torch and of CuPy give freed memory out again in the order of the stream that it was allocated on. They
know nothing of NCCL's stream. Without `async_op` the caller's stream waits for NCCL, so memory that is freed afterwards comes back
in the right order. With `async_op` it does not wait yet: so the handle holds the arrays until `wait()`, and the queue holds the handle.
An operation without a `wait()` gives its arrays up when it has ended on the device.

[Note: captures] Within a CUDA graph capture no operation runs. Its events are edges of the graph, and CUDA answers a question about
one of them with an error, which also ends the capture. So neither this queue nor the thread that watches it asks. NCCL counts
the graphs that hold its operations, and destroys or aborts no communicator before they are gone. It would wait, perhaps for ever: so a
communicator that has taken part in a capture is left to the end of the process.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum, auto
from typing import NamedTuple

from collectives.arrays.devices import DeviceArray
from collectives.arrays.dtypes import DType
from collectives.transports.gpu.binding import Binding, RawCommunicator
from collectives.transports.gpu.lane import Lane

_PAUSE_S = 5e-5  # between two looks at an event

DeviceCall = Callable[[], None]


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
    """An operation on its way. The arrays that `keep` is given live until `wait()`, or until it has ended [Note: memory]."""

    def __init__(self, queue: "Queue", what: _What, streams: Sequence[int]) -> None:
        self.what = what
        self._queue, self._streams = queue, streams
        self._arrays: tuple[object, ...] = ()
        self._done: _Event | None = None  # set when it is issued: for operations in a group, at its end
        self._is_captured = False  # it is a part of a CUDA graph [Note: captures]; set with `_done`

    def keep(self, *arrays: object) -> None:
        """Whatever owns the memory of the operation: source and result."""
        self._arrays = arrays
        self._queue._kept.append(self)

    def wait(self, stream: int | None = None) -> None:
        """Work queued on `stream` (by default the stream of the call) from now on starts after the operation.

        So does work on the streams of the call, because an array freed now may be allocated there again. NcclError if an error
        was noticed, RuntimeError if the operation was captured in a CUDA graph and the capture has ended.
        """
        self._queue._order(self, self._event(), dict.fromkeys([*self._streams, *([] if stream is None else [stream])]))
        self._arrays = ()

    def done(self) -> bool:
        """Whether the operation has ended on the device. NcclError if an error was noticed, RuntimeError if it was captured."""
        if self._is_captured:
            raise RuntimeError(
                f"done() of {self.what}: the operation was captured in a CUDA graph, and ends whenever the graph is replayed; ask "
                "about the replay"
            )
        return self._queue._has_ended(self.what, self._event())

    def _event(self) -> "_Event":
        if self._done is None:
            raise RuntimeError("wait() and done() of an operation in a group come after the group's end")
        return self._done


class _Event:
    """A CUDA event from the communicator's pool, to which it returns when no object holds it."""

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
    calls: Sequence[DeviceCall]
    after: Sequence[DeviceCall]  # kernels of our own that follow on NCCL's stream
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
        self._last: Underway | None = None  # the operation issued last, unless it was captured
        self._may_be_in_graphs = False
        self._kept: deque[Handle] = deque()  # in order of issue: those that may hold arrays [Note: memory]
        self._bytes = binding.constant("NCCL_UINT8")
        self._pool: list[int] = []  # events to use again
        # Held while it ends, and while arrays are given up: by the thread that calls it or by the one that watches.
        self._ending = threading.Lock()
        with binding.device(index):
            self._stream = lane.join(self, binding.stream_create)
            self._ready = binding.event_create()

    def mark(self, arrays: Sequence[DeviceArray], dtype: DType) -> Handle:
        """An operation that does nothing: it has ended when what is queued on the arrays' streams now has."""
        handle = self._run("mark", arrays, dtype, [], True)
        assert handle is not None
        return handle

    @contextmanager
    def group(self) -> Iterator[None]:
        """Operations in the block start together, as one, at its end. After an exception in the block no operation starts."""
        if self._group is not None:
            raise RuntimeError("a group inside a group; end the first group before")
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
        self._give_up_arrays()
        with self._ending:
            if self.is_over:
                return None
            self._raw.check_async_error()
            with self._binding.device(self.index):
                for each in (operation, self._last):
                    if each is not None and not self._binding.event_done(each.event.number):
                        return each
            return None

    @property
    def is_aborted(self) -> bool:
        """Whether an operation has failed, or it was aborted for another reason."""
        return self._state is _State.ABORTED

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until all its operations have ended on the device; NcclError if one failed, or takes longer than `timeout_s`."""
        if self._last is None:
            return
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        what, event = self._last
        deadline = time.monotonic() + timeout_s
        while not self._has_ended(what, event):
            if time.monotonic() > deadline:
                raise self._fail(what, TimeoutError(f"not ended after {timeout_s:g} s"))
            time.sleep(_PAUSE_S)
        self._give_up_arrays()

    def abort(self, why: str = "abort() was called") -> None:
        """End it at once, whatever is in flight: for after a failure. Not collective. Idempotent."""
        if self._state is not _State.OPEN:
            return
        self._state, self._why = _State.ABORTED, f"was aborted: {why}"
        if self._may_be_in_graphs:  # then it may never return: [Note: captures]
            self._leave_to_the_end()
            threading.Thread(target=self._abort_raw, name="collectives-nccl-abort", daemon=True).start()
            return
        with suppress(Exception):  # the device may be beyond help; the first error says why
            self._give_back(self._raw.abort)

    def _abort_raw(self) -> None:
        with suppress(Exception), self._binding.device(self.index):
            self._raw.abort()

    def free(self) -> None:
        """Wait for its operations and give it back. Collective. Idempotent."""
        if self._state is not _State.OPEN:
            return
        self.synchronize()
        self._state, self._why = _State.FREED, "was freed"
        if self._may_be_in_graphs:
            self._leave_to_the_end()
        else:
            self._give_back(self._raw.destroy)

    def _leave_to_the_end(self) -> None:
        """Keep the communicator until the process ends: CuPy's object would destroy it at the end of Python."""
        self._lane.leave(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._raw))

    def _give_back(self, end: DeviceCall) -> None:
        self._lane.leave(self)
        self._last = None
        with self._ending, self._binding.device(self.index):
            end()
            self._kept.clear()  # not earlier: until then kernels may use the arrays
            for event in (self._ready, *self._pool):
                self._binding.event_destroy(event)
            self._pool.clear()

    # For the operations

    def _run(
        self,
        operation: str,
        arrays: Sequence[DeviceArray],
        dtype: DType,
        calls: Sequence[DeviceCall],
        async_op: bool,
        after: Sequence[DeviceCall] = (),
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
            is_captured = b.is_capturing(self._stream)
            self._may_be_in_graphs = self._may_be_in_graphs or is_captured
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
            if not is_captured:
                self._last = Underway(what, done)
            for operation in operations:
                if operation.handle is not None:
                    operation.handle._is_captured, operation.handle._done = is_captured, done
                else:
                    for stream in operation.streams:
                        b.stream_wait(stream, done.number)
        self._give_up_arrays()

    def _give_up_arrays(self) -> None:
        """Let go of the arrays of operations that have ended [Note: memory]. Also called by the thread that watches."""
        if not self._kept:
            return
        ended: list[Handle] = []
        with self._ending, self._binding.device(self.index), suppress(Exception):  # the next operation notices an error
            while self._kept and self._needs_no_arrays(self._kept[0]):
                ended.append(self._kept.popleft())
        for handle in ended:  # without the lock: whatever is freed here may run any code
            handle._arrays = ()

    def _needs_no_arrays(self, handle: Handle) -> bool:
        if not handle._arrays:
            return True  # the program has waited for it
        if handle._is_captured:
            # A replay finds them where they were if they are of the graph's own memory pool, or if the program keeps them.
            return not self._binding.is_capturing(self._stream)
        return self._binding.event_done(handle._event().number)

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
        """Work queued on `streams` from now on starts after `event`."""
        if self._state is not _State.FREED:
            self._check(handle.what)
            with self._binding.device(self.index):
                if handle._is_captured and not self._binding.is_capturing(self._stream):
                    raise RuntimeError(
                        f"wait() of {handle.what} comes after the end of the CUDA graph capture in which the operation was issued; "
                        "call wait() before"
                    )
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
