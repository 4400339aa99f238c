"""Several operations issued as one: one pass over the messages, one message for neighbours that can share it."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.buffer import Buffer, is_jax
from collectives.communicator.calls import Call
from collectives.diagnosis.stacks import Site, issued_here
from collectives.diagnosis.threads import refusal
from collectives.transports.message import Message

# Arrays up to this size share a message: copying them costs less than the latency of another operation.
_SHARED_BYTES = 1 << 16
_CAN_SHARE = ("all_reduce", "broadcast", "reduce")


class _Waiting(NamedTuple):
    """A collective that waits for the end of its group."""

    call: Call
    carry_out: Callable[[Any], Any]  # on a communicator
    site: Site


class Group:
    """The operations between the two ends of `with comm.group():`, in the order in which they were issued."""

    def __init__(self, communicator: str) -> None:
        """`communicator`: what errors call it."""
        self._communicator, self._thread = communicator, get_ident()
        self._collectives: list[_Waiting] = []
        self._messages: list[tuple[Message, Site]] = []
        self._error: BaseException | None = None

    def add(self, call: Call, carry_out: Callable[[Any], Any], result: Any) -> None:
        """A collective that leaves its result in `result`."""
        self._check_thread(call.operation)
        _refuse_jax(call.operation, result)
        self._collectives.append(_Waiting(call, carry_out, issued_here()))

    def add_message(self, operation: str, message: Message, result: Any = None) -> None:
        """A `send` or `recv`."""
        self._check_thread(operation)
        _refuse_jax(operation, result)
        self._messages.append((message, issued_here()))

    @contextmanager
    def within(self) -> Iterator[None]:
        """A group within this one: its operations are this one's. An exception that leaves it discards all."""
        self._check_thread("group")
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    def _check_thread(self, operation: str) -> None:
        """RuntimeError for an operation of another thread, which would become a part of this one's group."""
        if get_ident() != self._thread:
            raise refusal(operation, self._communicator, "a group")

    def run(self, comm: Any) -> None:
        """Carry them all out: messages first begun and last waited for, collectives in between.

        Which of them first reads or writes an array that both use would depend on its size, so such a message gets a copy of its own.
        """
        if self._error is not None:
            raise ValueError(
                "group: nothing was carried out, since a group within this one ended with an exception: let it pass, or issue the "
                "operations outside"
            ) from self._error
        by_nccl = [message for message, _ in self._messages if comm._devices.takes(message)]
        by_mpi = [waiting for waiting in self._messages if not comm._devices.takes(waiting[0])]
        apart = self._apart([message for message, _ in by_mpi])
        ends = [
            _ending(site.carry_out(partial(comm._start, *moved)).wait, message, moved)
            for (message, site), moved in zip(by_mpi, apart, strict=True)
        ]
        ends += comm._devices.exchange(by_nccl)  # after those: copies to the host must not come to wait for NCCL
        for calls in self._runs():
            _, carry_out, site = calls[0]
            if len(calls) == 1:
                site.carry_out(partial(carry_out, comm))
            else:
                site.carry_out(partial(_carry_out_as_one, comm, [waiting.call for waiting in calls]))
        for end in ends:
            end()

    def _apart(self, messages: list[Message]) -> list[Message]:
        """`messages`, with an array of its own for each one that shares memory with what else the group writes."""
        used, received = _Stretches(), _Stretches()
        for waiting in self._collectives:
            for array in waiting.call.arrays:
                used.add(array)
        moved: dict[int, Message] = {}
        for receives in (True, False):  # a send needs to know all that is received
            for i, message in enumerate(messages):
                if (message.operation == "irecv") is receives and message.array.device is None:
                    if used.meet(message.array) or received.meet(message.array):
                        copy = np.empty_like(message.array.flat) if receives else message.array.flat.copy()
                        moved[i] = message._replace(array=Buffer(copy, "x"))
                    if receives:
                        received.add(message.array)
        return [moved.get(i, message) for i, message in enumerate(messages)]

    def _runs(self) -> Iterator[list[_Waiting]]:
        """Neighbours that can share a message, together. One that reads what one before it writes must come after that."""
        for key, calls in groupby(self._collectives, lambda waiting: _sharing(waiting.call)):
            run: list[_Waiting] = []
            written = _Stretches()
            for waiting in calls:
                array = waiting.call.arrays[0]
                # Broadcasts of one root write in turn what that root has only read.
                if run and (key is None or (waiting.call.operation != "broadcast" and written.meet(array))):
                    yield run
                    run, written = [], _Stretches()
                run.append(waiting)
                if key is not None:
                    written.add(array)
            yield run


class _Stretches:
    """Stretches of memory that arrays in host memory take up."""

    def __init__(self) -> None:
        self._begins: list[int] = []  # sorted, and none overlaps another
        self._ends: list[int] = []

    def meet(self, array: Buffer) -> bool:
        """Whether `array` has bytes in one of them."""
        first, last = self._among(array)
        return first < last

    def add(self, array: Buffer) -> None:
        if array.device is None and array.nbytes:
            begin, end = array.address, array.address + array.nbytes
            first, last = self._among(array)
            if first < last:
                begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
            self._begins[first:last], self._ends[first:last] = [begin], [end]

    def _among(self, array: Buffer) -> tuple[int, int]:
        """Which of them `array` meets: from the first number on, up to the last."""
        if array.device is not None or not array.nbytes:
            return 0, 0
        return bisect_right(self._ends, array.address), bisect_left(self._begins, array.address + array.nbytes)


def _ending(wait: Callable[[], Any], message: Message, moved: Message) -> Callable[[], Any]:
    """What is left to do for a `message` that travels as `moved`."""

    def deliver() -> None:
        wait()
        message.array.flat[...] = moved.array.flat

    return deliver if moved is not message and message.operation == "irecv" else wait


def _refuse_jax(operation: str, result: Any) -> None:
    if is_jax(result):
        raise ValueError(f"group: {operation} of a JAX array would give a new array; call it outside the group")


def _sharing(call: Call) -> Any:
    """The same for operations that can share a message; None for one that cannot. The same on all ranks."""
    b = call.arrays[0]
    if call.operation not in _CAN_SHARE or b.device is not None or b.flat.nbytes > _SHARED_BYTES:
        return None
    # What is only moved shares a message whatever its type.
    kind = "bytes" if call.operation == "broadcast" else b.dtype.name
    return call.operation, kind, call.algorithm, call.op, call.root, call.accumulate


def _carry_out_as_one(comm: Any, calls: list[Call]) -> None:
    name, root = calls[0].operation, calls[0].root
    # All ranks write after an all-reduce, the root after a reduce, the others after a broadcast.
    writes = name == "all_reduce" or (comm.rank == root) == (name == "reduce")
    flats = [call.arrays[0].flat for call in calls]
    if name == "broadcast":
        flats = [flat.view(np.uint8) for flat in flats]
    packed = np.concatenate(flats)
    options = {key: getattr(calls[0], key) for key in ("algorithm", "op", "root", "accumulate")}
    getattr(comm, name)(packed, **{key: value for key, value in options.items() if value is not None})
    begin = 0
    for call, flat in zip(calls, flats, strict=True):
        if writes:
            flat[...] = packed[begin : begin + flat.size]
            call.arrays[0].result()
        begin += flat.size
