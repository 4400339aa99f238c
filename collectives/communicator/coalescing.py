"""How a group is carried out: one pass over the messages, one message for neighbouring collectives that can share it."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.communicator.call import Call
from collectives.communicator.group import Group, WaitingCall
from collectives.communicator.messages import Messages
from collectives.communicator.operations import Collectives
from collectives.transports.message import Message

if TYPE_CHECKING:  # importing it starts MPI
    from collectives.transports.gpu.device import Devices

# Arrays up to this size share a message: copying them costs less than the latency of another operation.
_SHARED_BYTES = 1 << 16
_CAN_SHARE = ("all_reduce", "broadcast", "reduce")


def carry_out(group: Group, collectives: Collectives, messages: Messages, devices: "Devices") -> None:
    """All that the group has: messages first begun and last waited for, collectives in between.

    Which of them first reads or writes an array that both use would depend on its size, so such a message gets a copy of its own.
    """
    group.refuse_discarded()
    by_nccl = [message for message, _ in group.messages if devices.takes(message)]
    by_mpi = [waiting for waiting in group.messages if not devices.takes(waiting.message)]
    apart = _apart([message for message, _ in by_mpi], group.calls)
    ends = [
        _ending(site.carry_out(partial(messages.start, *moved)).wait, message, moved)
        for (message, site), moved in zip(by_mpi, apart, strict=True)
    ]
    ends += devices.exchange(by_nccl)  # after those: copies to the host must not come to wait for NCCL
    for calls in _runs(group.calls):
        _, operation, site = calls[0]
        if len(calls) > 1:
            operation = partial(_carry_out_as_one, collectives, [waiting.call for waiting in calls])
        site.carry_out(operation)
    for end in ends:
        end()


def _apart(messages: list[Message], calls: list[WaitingCall]) -> list[Message]:
    """`messages`, with an array of its own for each one that shares memory with what else the group writes."""
    used, received = _Stretches(), _Stretches()
    for waiting in calls:
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


def _runs(calls: list[WaitingCall]) -> Iterator[list[WaitingCall]]:
    """Runs of neighbours that can share a message. A call that reads an array which an earlier call writes begins a new run."""
    for key, neighbours in groupby(calls, lambda waiting: _sharing(waiting.call)):
        run: list[WaitingCall] = []
        written = _Stretches()
        for waiting in neighbours:
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
    """The last step of a `message` that travels as `moved`."""

    def deliver() -> None:
        wait()
        message.array.flat[...] = moved.array.flat

    return deliver if moved is not message and message.operation == "irecv" else wait


def _sharing(call: Call) -> Any:
    """The same for operations that can share a message; None for one that cannot. The same on all ranks."""
    b = call.arrays[0]
    if call.operation not in _CAN_SHARE or b.device is not None or b.flat.nbytes > _SHARED_BYTES:
        return None
    # What is only moved shares a message whatever its type.
    kind = "bytes" if call.operation == "broadcast" else b.dtype.name
    return call.operation, kind, call.algorithm, call.op, call.root, call.accumulate


def _carry_out_as_one(collectives: Collectives, calls: list[Call]) -> None:
    name, root = calls[0].operation, calls[0].root
    # All ranks write after an all-reduce, the root after a reduce, the others after a broadcast.
    writes = name == "all_reduce" or (collectives.rank == root) == (name == "reduce")
    flats = [call.arrays[0].flat for call in calls]
    if name == "broadcast":
        flats = [flat.view(np.uint8) for flat in flats]
    packed = np.concatenate(flats)
    options = {key: getattr(calls[0], key) for key in ("algorithm", "op", "root", "accumulate")}
    getattr(collectives, name)(packed, **{key: value for key, value in options.items() if value is not None})
    begin = 0
    for call, flat in zip(calls, flats, strict=True):
        if writes:
            flat[...] = packed[begin : begin + flat.size]
            call.arrays[0].result()
        begin += flat.size
