"""Carries out a group: all messages at the same time, and consecutive small collectives packed into one."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.communicator.group import Group, WaitingCall
from collectives.communicator.messages import Messages
from collectives.communicator.operations import Collectives
from collectives.selection.selector import UNENCODED
from collectives.transports.call import Call
from collectives.transports.message import Message

if TYPE_CHECKING:  # this import starts MPI
    from collectives.transports.gpu.device import Devices

# Arrays up to this size are packed into one operation: copying them costs less than the latency of another operation.
_SHARED_BYTES = 1 << 16
_CAN_SHARE = ("all_reduce", "broadcast", "reduce")


def carry_out(group: Group, collectives: Collectives, messages: Messages, devices: "Devices") -> None:
    """Carry out the group: start its messages, run its collectives, wait for its messages.

    A message may read or write its array at any time until its wait. So if a collective uses the same array, the message gets a copy.
    """
    group.refuse_discarded()
    by_nccl = [message for message, _ in group.messages if devices.takes(message)]
    by_mpi = [waiting for waiting in group.messages if not devices.takes(waiting.message)]
    apart = _apart([message for message, _ in by_mpi], group.calls)
    ends = [
        _ending(site.carry_out(partial(messages.start, *moved)).wait, message, moved)
        for (message, site), moved in zip(by_mpi, apart, strict=True)
    ]
    ends += devices.exchange(by_nccl)  # after MPI's messages, which must not wait for NCCL when they copy to the host
    for calls in _runs(group.calls):
        _, operation, site = calls[0]
        if len(calls) > 1:
            operation = partial(_carry_out_as_one, collectives, [waiting.call for waiting in calls])
        site.carry_out(operation)
    for end in ends:
        end()


def _apart(messages: list[Message], calls: list[WaitingCall]) -> list[Message]:
    """`messages`, with a copy of the array wherever another operation of the group uses the same memory."""
    used, received = _Stretches(), _Stretches()
    for waiting in calls:
        for array in waiting.call.arrays:
            used.add(array)
    moved: dict[int, Message] = {}
    for receives in (True, False):  # receives first: a send must know all received arrays
        for i, message in enumerate(messages):
            if (message.operation == "irecv") is receives and message.array.device is None:
                if used.meet(message.array) or received.meet(message.array):
                    copy = np.empty_like(message.array.flat) if receives else message.array.flat.copy()
                    moved[i] = message._replace(array=Buffer(copy, "x"))
                if receives:
                    received.add(message.array)
    return [moved.get(i, message) for i, message in enumerate(messages)]


def _runs(calls: list[WaitingCall]) -> Iterator[list[WaitingCall]]:
    """Runs of consecutive calls that can be packed. A call that reads an array which an earlier call writes begins a new run."""
    for key, neighbours in groupby(calls, lambda waiting: _sharing(waiting.call)):
        run: list[WaitingCall] = []
        written = _Stretches()
        for waiting in neighbours:
            array = waiting.call.arrays[0]
            # Broadcasts of the same root may overlap: the root only reads, the other ranks unpack in the order of the calls.
            if run and (key is None or (waiting.call.operation != "broadcast" and written.meet(array))):
                yield run
                run, written = [], _Stretches()
            run.append(waiting)
            if key is not None:
                written.add(array)
        yield run


class _Stretches:
    """The address ranges of arrays in host memory."""

    def __init__(self) -> None:
        self._begins: list[int] = []  # sorted; the ranges do not overlap
        self._ends: list[int] = []

    def meet(self, array: Buffer) -> bool:
        """Whether `array` overlaps one of the ranges."""
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
        """The ranges that overlap `array`, as the first index and the index after the last."""
        if array.device is not None or not array.nbytes:
            return 0, 0
        return bisect_right(self._ends, array.address), bisect_left(self._begins, array.address + array.nbytes)


def _ending(wait: Callable[[], Any], message: Message, moved: Message) -> Callable[[], Any]:
    """The wait for `message`, whose data travels as `moved`; a received copy is then written to the array of `message`."""

    def deliver() -> None:
        wait()
        message.array.flat[...] = moved.array.flat

    return deliver if moved is not message and message.operation == "irecv" else wait


def _sharing(call: Call) -> Any:
    """A key that is equal for calls that can be packed together; None for a call that cannot be packed. The same on all ranks."""
    b = call.arrays[0]
    if call.operation not in _CAN_SHARE or b.device is not None or b.flat.nbytes > _SHARED_BYTES:
        return None
    if call.is_encoded:  # packed arrays would share the scales of blocks
        return None
    # A broadcast only moves bytes, so arrays of different dtypes can be packed.
    kind = "bytes" if call.operation == "broadcast" else b.dtype.name
    return call.operation, kind, call.algorithm, call.op, call.root, call.accumulate


def _carry_out_as_one(collectives: Collectives, calls: list[Call]) -> None:
    name, root = calls[0].operation, calls[0].root
    # The result is unpacked by all ranks after an all-reduce, by the root after a reduce, by the other ranks after a broadcast.
    writes = name == "all_reduce" or (collectives.rank == root) == (name == "reduce")
    flats = [call.arrays[0].flat for call in calls]
    if name == "broadcast":
        flats = [flat.view(np.uint8) for flat in flats]
    packed = np.concatenate(flats)
    options = {key: getattr(calls[0], key) for key in ("algorithm", "op", "root", "accumulate")}
    if options["algorithm"] == "auto":
        options["algorithm"] = UNENCODED
    getattr(collectives, name)(packed, **{key: value for key, value in options.items() if value is not None})
    begin = 0
    for call, flat in zip(calls, flats, strict=True):
        if writes:
            flat[...] = packed[begin : begin + flat.size]
            call.arrays[0].result()
        begin += flat.size
