"""Collectives on arrays in GPU memory: by NCCL, else by CUDA-aware MPI.

Each collective returns whether it was carried out here. If not, the caller goes on with a copy in host memory
(collectives/arrays/devices.py).
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.arrays.devices import DeviceArray, say_once
from collectives.arrays.dtypes import DType
from collectives.diagnosis.record import Log
from collectives.diagnosis.recorder import Recorder
from collectives.schedules import BUILDERS
from collectives.selection.selector import EXACT, Placement, obstacle, schedule_by_rule
from collectives.transports.call import Call
from collectives.transports.executor import Executor
from collectives.transports.gpu import cuda, device_messages, watch
from collectives.transports.gpu.binding import NcclUnavailableError
from collectives.transports.gpu.kernels import Kernels, kernels_of
from collectives.transports.gpu.nccl import Nccl, connect, reduces
from collectives.transports.gpu.nccl_queue import Handle
from collectives.transports.message import Message
from collectives.transports.mpi import Library
from collectives.transports.scheduled import Scheduled
from collectives.transports.transport import Transport, put_own_part

_log = logging.getLogger("collectives")


class Devices:
    """A communicator's transports between GPUs. The first collective on arrays in GPU memory finds out which ones work."""

    def __init__(
        self,
        mpi: Any,
        *,
        placement: Placement,
        away: Collection[int],
        recorder: Recorder,
        flush: Callable[[], None],
        wire: Callable[[], str],
    ) -> None:
        """`placement`: of the ranks of `mpi`; `away`: those on other nodes.

        `flush()`: carries out the operations that come before a collective. `wire()`: the format of data between nodes, without NCCL.
        """
        self._mpi, self._rank, self._size, self._placement = mpi, mpi.rank, mpi.size, placement
        self._away = away
        self._recorder, self._flush, self._wire = recorder, flush, wire
        self._nccl: Nccl | None = None
        self._why_not = ""
        self._index: int | None = None
        self._has_looked = False  # whether `_look` was called
        self._kernels: Kernels | None = None  # not None if MPI accepts device addresses
        self._executor: Executor | None = None
        self._handles: list[tuple[Handle, Buffer]] | None = None  # of the operation that `issue` is starting

    @property
    def by_nccl(self) -> bool:
        """Whether NCCL connects the ranks. False before the first collective on arrays in GPU memory."""
        return self._nccl is not None

    def carry_out(self, call: Call, arrays: Sequence[Buffer | None], *arguments: Any) -> bool:
        """Carry out `call` by NCCL if possible, else by MPI on device addresses if possible. Returns whether it was carried out.

        `arrays`, `arguments`: those of the `Transport`'s method of the operation; a reduction's last argument, the dtype, is left out.
        The first of `call.arrays`, which is in GPU memory, decides: in gather and scatter it is the only one that all ranks have.
        """
        operation, algorithm, op, first = call.operation, call.algorithm, call.op, call.arrays[0]
        devices = [b.device for b in call.arrays if b.device is not None]
        mixed = len(devices) < len(call.arrays)
        index, dtype = devices[0].index, first.dtype
        if (mixed and operation not in ("gather", "scatter")) or index is None:
            return False  # the arrays are in different kinds of memory, or an array does not give its GPU
        if algorithm not in ("auto", "nccl", "mpi") and not _is_schedule(operation, algorithm):
            return False
        if call.accumulate is not None and dtype.is_half:
            return False  # the host makes the fp32 copy
        self._flush()  # also before NCCL: a rank that waits for the device cannot carry out other operations
        if self._index is None:
            self._index = index
        if strange := [device.index for device in devices if device.index != self._index]:
            raise ValueError(
                f"{operation}: an array is on device {strange[0]}, but earlier arrays of this communicator were on device "
                f"{self._index}; use one device on each rank"
            )
        enter = partial(self._recorder.enter, operation, op=op, root=call.root, elements=first.size, dtype=dtype.name)
        is_alone = self._size == 1 and algorithm != "nccl" and not mixed
        if is_alone and len({device.address for device in devices}) == 1:  # one rank in place: the result is the input
            with enter():
                if self._handles is not None:
                    self._mark(self._handles, call.arrays, devices)
            return True
        self._look(index)
        nccl = self._nccl if algorithm in ("auto", "nccl") and (op is None or reduces(dtype)) else None
        if nccl is None and algorithm == "nccl":
            raise ValueError(
                f"algorithm 'nccl' cannot be used on this {dtype.name} array: {self._why_not or 'NCCL cannot reduce it'}"
            )
        nbytes = max(b.size for b in call.arrays) * dtype.itemsize
        chosen = "nccl" if nccl is not None else self._choose(operation, algorithm, op, dtype, nbytes)
        if chosen is None:
            return False
        if mixed:
            raise ValueError(
                f"{operation}: one of x and out is in GPU memory, the other in host memory; pass both in the same kind of memory"
            )
        with enter() as entry:
            entry.by(chosen)
            at = [b and b.device for b in arrays]
            if nccl is not None:
                handle = getattr(nccl, operation)(*at, *arguments, dtype, async_op=self._handles is not None)
                if handle is not None and self._handles is not None:
                    handle.keep(*call.arrays)
                    self._handles.append((handle, first))
            else:
                with cuda.calling(*devices):
                    views = [device and cuda.view(device, dtype) for device in at]
                    if operation in ("gather", "scatter"):
                        self._put_own_part(operation, *views)
                    reduction = (dtype,) if op is not None else ()
                    getattr(self._transport(chosen), operation)(*views, *arguments, *reduction)
        return True

    def issue(self, operation: Callable[[], Any]) -> tuple[Any, list[tuple[Handle, Buffer]]]:
        """Start `operation`, a collective on arrays in GPU memory, at once; with NCCL it runs asynchronously on NCCL's stream.

        Returns its result, and the handles of what NCCL carries out, each with an array: see progress/on_stream.py.
        """
        self._handles = []
        try:
            result = operation()
            return result, self._handles
        finally:
            self._handles = None

    def takes(self, message: Message) -> bool:
        """Whether NCCL carries a message of a group, not MPI [Note: messages]."""
        return self._nccl is not None and message.tag == 0

    def exchange(self, messages: Sequence[Message]) -> list[Callable[[], Any]]:
        """Start messages by NCCL, as one. Returns the functions to call at the end of their group."""
        if not messages:
            return []
        assert self._nccl is not None
        return device_messages.exchange(self._nccl, messages, self._recorder.log)

    def free(self) -> None:
        """Collective."""
        if self._nccl is not None:
            connected.remove(self._nccl)
            self._nccl.free()
        if self._executor is not None:
            self._executor.free()

    def _put_own_part(self, operation: str, out: Any, x: Any) -> None:
        """Copy the root's own part of a gather or a scatter, which a transport leaves to its caller."""
        assert self._kernels is not None
        if operation == "gather" and out is not None:
            put_own_part(out, x, [x.size] * self._size, self._rank, self._kernels)
        if operation == "scatter" and x is not None:
            mine = x[self._rank * out.size :][: out.size]
            if not np.may_share_memory(out, mine):
                self._kernels.move(out, mine)

    def _choose(self, operation: str, algorithm: str, op: str | None, dtype: DType, nbytes: int) -> str | None:
        """The algorithm for MPI on device addresses; None if MPI does not accept them, or if no algorithm fits."""
        if self._kernels is None:
            return None
        if algorithm in ("auto", "mpi") and (op is None or cuda.reduces(dtype, op)):
            why_not = obstacle(operation, "mpi", placement=self._placement, itemsize=dtype.itemsize, nbytes=nbytes)
            if why_not is None:
                return "mpi"
        if algorithm == "mpi" or (op is not None and not self._kernels.reduces(dtype, op)):
            return None
        return schedule_by_rule(operation, nbytes) if algorithm == "auto" else algorithm

    def _transport(self, algorithm: str) -> Transport:
        assert self._kernels is not None
        if algorithm == "mpi":
            return Library(self._mpi, self._kernels)
        if self._executor is None:
            self._executor = Executor(self._mpi, self._kernels, away=self._away)
        return Scheduled(self._executor, algorithm, rank=self._rank, size=self._size)

    def _mark(
        self, handles: list[tuple[Handle, Buffer]], buffers: Sequence[Buffer], devices: Sequence[DeviceArray]
    ) -> None:
        """For one rank with `async_op`: work after `wait()` starts after the work that is now queued on the arrays' streams."""
        assert devices[0].index is not None
        self._look(devices[0].index)
        if self._nccl is None:
            cuda.wait_for(*devices)
        else:
            handle = self._nccl.mark(devices, buffers[0].dtype)
            handle.keep(*buffers)
            handles.append((handle, buffers[0]))

    def _look(self, index: int) -> None:
        """Find the transports that work, once. Collective. It is in the flight record, because it waits for all ranks."""
        if self._has_looked:
            return
        with self._recorder.enter("connecting GPUs"):
            try:
                self._nccl = connect(self._mpi, index)
                connected.add(self._nccl, self._recorder.log)
                watch.over(self._nccl)
            except NcclUnavailableError as error:  # raised on all ranks
                self._why_not = str(error)
                say_once(f"no NCCL for arrays in GPU memory: {error}", about="no NCCL")
            kernels = kernels_of(index)
            if cuda.agree(self._mpi, None if kernels is None else kernels.array).aware:
                self._kernels = kernels
            self._has_looked = True
        mover = "NCCL" if self._nccl is not None else "CUDA-aware MPI" if self._kernels is not None else ""
        if mover and self._placement.num_nodes > 1 and (wire := self._wire()) != EXACT:
            say_once(f"arrays in GPU memory are sent between nodes as they are, not in {wire}: {mover} moves them")


class Connected:
    """NCCL's communicators in this process in the order of their creation, which is the same on all ranks that share them.

    The list keeps them from Python's garbage collector, because it is collective to destroy one. See diagnosis/ending.py.
    """

    def __init__(self) -> None:
        self._all: list[tuple[Nccl, Log]] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, nccl: Nccl, log: Log) -> None:
        self._all.append((nccl, log))

    def remove(self, nccl: Nccl) -> None:
        self._all = [each for each in self._all if each[0] is not nccl]  # after `end` the list is empty

    def settle(self) -> bool:
        """Wait until all operations have ended on the device. Returns whether they have ended without an error."""
        try:
            for nccl, log in self._all:
                with log.enter("ending NCCL"):
                    nccl.synchronize()
        except Exception as error:
            _log.warning("at the end of the program: %s", error)
        return not any(nccl.is_aborted for nccl, _ in self._all)

    def end(self, *, well: bool) -> None:
        """If `well`, all ranks destroy their communicators together. Else this rank aborts its own without a wait for other ranks."""
        while self._all:
            nccl, log = self._all.pop(0)
            if not well:
                nccl.abort("the program ends by an error")
                continue
            try:
                with log.enter("ending NCCL"):
                    nccl.free()
            except Exception as error:
                _log.warning("at the end of the program: %s", error)
                well = False


connected = Connected()


def _is_schedule(operation: str, algorithm: str) -> bool:
    return algorithm in BUILDERS[operation] and algorithm != "two_level"
