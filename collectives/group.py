"""Several operations issued as one: one pass over the messages, one message for neighbours that can share it."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import Buffer
from collectives.diagnosis.stacks import Site, issued_here
from collectives.work import Work

# Arrays up to this size share a message: copying them costs less than the latency of another operation.
_SHARED_BYTES = 1 << 16
_CAN_SHARE = ("all_reduce", "broadcast", "reduce")


class Call(NamedTuple):
    """An operation that waits for the end of its group: a method of `Communicator` and what it was called with."""

    method: Callable[..., Any]
    arguments: tuple[Any, ...]  # the array first
    options: dict[str, Any]
    site: Site


class Group:
    """The operations between the two ends of `with comm.group():`, in the order in which they were issued."""

    def __init__(self) -> None:
        self._collectives: list[Call] = []
        self._messages: list[Call] = []

    def add(self, method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A collective."""
        self._collectives.append(Call(method, arguments, options, issued_here()))

    def add_message(self, start: Callable[..., Work], *arguments: Any) -> None:
        """A `send` or `recv`, which `start` begins."""
        self._messages.append(Call(start, arguments, {}, issued_here()))

    def run(self, comm: Any) -> None:
        """Carry them all out: messages first begun and last waited for, collectives in between."""
        by_nccl, by_mpi = comm._devices.sort_messages(self._messages)
        ends = [call.site.carry_out(partial(call.method, comm, *call.arguments)).wait for call in by_mpi]
        ends += comm._devices.exchange(by_nccl)  # after those: copies to the host must not come to wait for NCCL
        for calls in self._runs():
            method, arguments, options, site = calls[0]
            if len(calls) == 1:
                site.carry_out(partial(method, comm, *arguments, **options))
            else:
                site.carry_out(partial(_carry_out_as_one, comm, calls))
        for end in ends:
            end()

    def _runs(self) -> Iterator[list[Call]]:
        """Neighbours that can share a message, together."""
        for key, calls in groupby(self._collectives, _sharing):
            if key is None:
                yield from ([call] for call in calls)
            else:
                yield list(calls)


def _sharing(call: Call) -> Any:
    """The same for operations that can share a message; None for one that cannot. The same on all ranks."""
    name = call.method.__name__
    if name not in _CAN_SHARE:
        return None
    b = Buffer(call.arguments[0], "x")
    if b.device is not None or b.flat.nbytes > _SHARED_BYTES:
        return None
    # What is only moved shares a message whatever its type.
    kind = "bytes" if name == "broadcast" else b.dtype.name
    return name, kind, call.arguments[1:], tuple(call.options.items())


def _carry_out_as_one(comm: Any, calls: list[Call]) -> None:
    method, (_, *arguments), options, _ = calls[0]
    name = method.__name__
    # All ranks write after an all-reduce, the root after a reduce, the others after a broadcast.
    writes = name == "all_reduce" or (comm.rank == arguments[0]) == (name == "reduce")
    buffers = [Buffer(call.arguments[0], "x", writable=writes) for call in calls]
    flats = [b.flat.view(np.uint8) if name == "broadcast" else b.flat for b in buffers]
    packed = np.concatenate(flats)
    method(comm, packed, *arguments, **options)
    begin = 0
    for b, flat in zip(buffers, flats, strict=True):
        if writes:
            flat[...] = packed[begin : begin + flat.size]
            b.result()
        begin += flat.size
