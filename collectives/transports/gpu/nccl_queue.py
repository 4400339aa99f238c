"""Issues NCCL's calls to a device, orders them with the caller's streams by events, and handles their errors.

    caller's stream   ... kernels that write x | record ready |                              | wait for done | kernels that read x
    NCCL's stream                               wait for ready | NCCL's kernel | record done |

None of these steps blocks the host. With `async_op` the last wait is left to `Handle.wait`, and the caller's kernels overlap NCCL's.

[Note: memory] The memory pools of torch and CuPy reuse freed memory in the order of the stream on which it was allocated. They do not
know NCCL's stream. Without `async_op` the caller's stream waits for NCCL, so memory that is freed afterwards is reused in the right
order. With `async_op` the stream does not wait yet, so the handle holds the arrays until `wait()`, and the queue holds the handle. An
operation without a `wait()` releases its arrays when it has ended on the device.

[Note: captures] In a CUDA graph capture no operation runs. Its events are edges of the graph; to query such an event is an error, which
also ends the capture. So neither this queue nor the thread that watches it queries them. NCCL counts the graphs that contain its
operations, and does not destroy or abort a communicator before these graphs are gone. That wait might last forever, so a communicator
that was used in a capture is kept until the process ends.
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

_PAUSE_S = 5e-5  # between two queries of an event

DeviceCall = Callable[[], None]


class NcclError(RuntimeError):
    """NCCL failed. The communicator has been aborted, so that none of its kernels waits forever; it cannot be used again."""


class _What(NamedTuple):
    """The description of an operation in errors."""

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
    """An issued operation. The arrays that `keep` holds stay alive until `wait()` or the operation's end [Note: memory]."""

    def __init__(self, queue: "Queue", what: _What, streams: Sequence[int]) -> None:
        self.what = what
        self._queue, self._streams = queue, streams
        self._arrays: tuple[object, ...] = ()
        self._done: _Event | None = None  # set when the operation is issued: in a group at the group's end
        self._is_captured = False  # whether the operation is in a CUDA graph [Note: captures]; set with `_done`

    def keep(self, *arrays: object) -> None:
        """Hold the objects that own the operation's memory: source and result."""
        self._arrays = arrays
        self._queue._kept.append(self)

    def wait(self, stream: int | None = None) -> None:
        """Make work that is queued on `stream` and on the streams of the call from now on start after the operation.

        The streams of the call must wait too, because memory that is freed now may be allocated there again. NcclError if NCCL has
        failed, RuntimeError if the operation was captured in a CUDA graph and the capture has ended.
        """
        self._queue._order(self, self._event(), dict.fromkeys([*self._streams, *([] if stream is None else [stream])]))
        self._arrays = ()

    def done(self) -> bool:
        """Whether the operation has ended on the device. NcclError if NCCL has failed, RuntimeError if it was captured."""
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
    """A CUDA event from the communicator's pool. It returns to the pool when no object refers to it."""

    def __init__(self, number: int, pool: list[int]) -> None:
        self.number, self._pool = number, pool

    def __del__(self) -> None:
        self._pool.append(self.number)


class Underway(NamedTuple):
    """An issued operation, and the event that marks its end."""

    what: _What
    event: _Event


class _Operation(NamedTuple):
    """NCCL's calls for one operation that is not issued yet."""

    what: _What
    streams: Sequence[int]
    calls: Sequence[DeviceCall]
    after: Sequence[DeviceCall]  # calls that queue our own kernels after NCCL's on its stream
    handle: Handle | None


class Queue:
    """Issues NCCL's calls for one communicator and device, detects their errors, and ends the communicator. One thread at a time.

    Its subclass `Nccl` has the operations.
    """

    def __init__(
        self, raw: RawCommunicator, rank: int, size: int, index: int, binding: Binding, lane: Lane, timeout_s: float
    ) -> None:
        self.rank, self.size, self.index = rank, size, index
        self._raw, self._binding, self._lane, self._timeout_s = raw, binding, lane, timeout_s
        self._state, self._why = _State.OPEN, ""
        self._group: list[_Operation] | None = None
        self._last: Underway | None = None  # the last issued operation that was not captured
        self._may_be_in_graphs = False
        self._kept: deque[Handle] = deque()  # handles that may hold arrays, in order of issue [Note: memory]
        self._bytes = binding.constant("NCCL_UINT8")
        self._pool: list[int] = []  # events for reuse
        # Held while the communicator ends and while arrays are released: by the calling thread or the watching thread.
        self._ending = threading.Lock()
        with binding.device(index):
            self._stream = lane.join(self, binding.stream_create)
            self._ready = binding.event_create()

    def mark(self, arrays: Sequence[DeviceArray], dtype: DType) -> Handle:
        """An empty operation: it ends with the work that is now queued on the arrays' streams."""
        handle = self._run("mark", arrays, dtype, [], True)
        assert handle is not None
        return handle

    @contextmanager
    def group(self) -> Iterator[None]:
        """Start the operations of the block together at its end. After an exception in the block no operation starts."""
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

    # State and end

    @property
    def is_over(self) -> bool:
        """Whether the communicator was freed or aborted."""
        return self._state is not _State.OPEN

    def look(self, operation: Underway | None) -> Underway | None:
        """For the watching thread: `operation` if it has not ended, else the last issued one if that has not ended, else None.

        Raises an error of the device or the network, which the communicator's own thread can still detect.
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
        """Whether the communicator was aborted, after a failed operation or for another reason."""
        return self._state is _State.ABORTED

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until all operations have ended on the device. NcclError if one fails, or takes longer than `timeout_s`."""
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
        """End the communicator at once after a failure, also with unfinished operations. Not collective. Idempotent."""
        if self._state is not _State.OPEN:
            return
        self._state, self._why = _State.ABORTED, f"was aborted: {why}"
        if self._may_be_in_graphs:  # NCCL's abort may then never return: [Note: captures]
            self._leave_to_the_end()
            threading.Thread(target=self._abort_raw, name="collectives-nccl-abort", daemon=True).start()
            return
        with suppress(Exception):  # the device may have failed; the first error tells the reason
            self._give_back(self._raw.abort)

    def _abort_raw(self) -> None:
        with suppress(Exception), self._binding.device(self.index):
            self._raw.abort()

    def free(self) -> None:
        """Wait for all operations and free the communicator. Collective. Idempotent."""
        if self._state is not _State.OPEN:
            return
        self.synchronize()
        self._state, self._why = _State.FREED, "was freed"
        if self._may_be_in_graphs:
            self._leave_to_the_end()
        else:
            self._give_back(self._raw.destroy)

    def _leave_to_the_end(self) -> None:
        """Keep the communicator until the process ends: without the reference CuPy's object would destroy it earlier."""
        self._lane.leave(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._raw))

    def _give_back(self, end: DeviceCall) -> None:
        self._lane.leave(self)
        self._last = None
        with self._ending, self._binding.device(self.index):
            end()
            self._kept.clear()  # after `end`, because kernels may use the arrays until then
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
        """Issue an operation, or store it until the end of the group."""
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
        """Start operations as one, after the work on their arrays' streams and before an event that marks their end."""
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
        """Release the arrays of operations that have ended [Note: memory]. The watching thread calls this, too."""
        if not self._kept:
            return
        ended: list[Handle] = []
        with self._ending, self._binding.device(self.index), suppress(Exception):  # the next operation raises an error
            while self._kept and self._needs_no_arrays(self._kept[0]):
                ended.append(self._kept.popleft())
        for handle in ended:  # without the lock, because the end of an array may run other code
            handle._arrays = ()

    def _needs_no_arrays(self, handle: Handle) -> bool:
        if not handle._arrays:
            return True  # the program has waited for it
        if handle._is_captured:
            # A replay uses the same addresses: they stay valid if they are in the graph's memory pool or the program keeps the arrays.
            return not self._binding.is_capturing(self._stream)
        return self._binding.event_done(handle._event().number)

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        self._binding.group_start()
        try:
            yield
        except Exception:
            with suppress(Exception):  # the first error is raised
                self._binding.group_end()
            raise
        self._binding.group_end()

    def _order(self, handle: Handle, event: _Event, streams: Iterable[int]) -> None:
        """Make work that is queued on `streams` from now on start after `event`."""
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
        """NcclError if the communicator has ended, or if NCCL has a new error."""
        if self._state is not _State.OPEN:
            raise NcclError(f"{what}: the NCCL communicator {self._why}")
        try:
            self._raw.check_async_error()
        except Exception as error:
            before = f"noticed at {what}" + (f", after {self._last.what} was started" if self._last else "")
            raise self._fail(before, error) from error

    def _fail(self, where: object, error: Exception) -> NcclError:
        """Abort the communicator, and return the error to raise."""
        text = f"NCCL failed on rank {self.rank} of {self.size}, {where}: {error}"
        self.abort(text)
        return NcclError(f"{text}; its communicator is aborted")
