"""Messages between two ranks: send, recv, isend, irecv of a Communicator."""

import threading
from collections import Counter
from collections.abc import Callable
from operator import index
from typing import Any

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.communicator import unfinished
from collectives.communicator.group import Groups
from collectives.diagnosis.record import ENDED, FAILED, Entry, Log
from collectives.diagnosis.stacks import issued_here
from collectives.progress.progress import Progress
from collectives.progress.queue import AsyncQueue
from collectives.progress.work import Work
from collectives.transports.message import Message

_USER_TAG = 1 << 8  # tags below are the library's own
_NUM_USER_TAGS = (1 << 15) - _USER_TAG  # MPI guarantees tags up to 32767


class Messages:
    """The messages of one communicator. calls.py explains the methods and their arguments.

    `in_flight`: the unfinished messages.
    """

    def __init__(
        self,
        mpi: Any,
        *,
        log: Log,
        queue: AsyncQueue,
        groups: Groups,
        checked: bool,
        describe: Callable[[np.ndarray], list[Any]],
        reach: Callable[[Buffer], np.ndarray],
    ) -> None:
        """`describe(flat)`: mpi4py's description of a message. `reach(x)`: the memory of `x` that MPI reads or writes."""
        self._mpi, self._rank, self._size = mpi, mpi.rank, mpi.size
        self._log, self._queue, self._groups = log, queue, groups
        self._describe, self._reach, self._checked = describe, reach, checked
        self.in_flight = InFlight()
        # By tag: the number of messages to this rank itself that have no receive yet; negative: receives without a message.
        self._to_self: Counter[int] = Counter()

    def send(self, x: Any, peer: int, tag: int) -> None:
        peer, tag = self._check_peer("send", peer, tag)
        b = self._array("send", x)
        if (group := self._groups.current) is not None:
            group.add_message("send", Message("isend", b, peer, tag))
            return
        if peer == self._rank and self._to_self[tag] >= 0:
            raise ValueError(
                f"send: peer {peer} is this rank, which would wait here for its own receive; use isend and irecv, or group()"
            )
        if peer == self._rank or self._queue.progress.pending():
            self.start("isend", b, peer, tag).wait()
        else:
            with self._log.enter_pair("send", peer, tag, b.size, b.dtype.name):
                self._mpi.Send(self._describe(self._reach(b)), peer, _USER_TAG + tag)

    def recv(self, x: Any, peer: int, tag: int) -> Any:
        peer, tag = self._check_peer("recv", peer, tag)
        b = self._array("recv", x)
        if (group := self._groups.current) is not None:
            group.add_message("recv", Message("irecv", b, peer, tag), x)
            return x
        if peer == self._rank:
            if self._to_self[tag] <= 0:
                raise ValueError(
                    f"recv: peer {peer} is this rank, which has sent no such message; call isend before, or use irecv or group()"
                )
            self._to_self[tag] -= 1
        return self._receive(b, peer, tag)

    def isend(self, x: Any, peer: int, tag: int) -> Work:
        peer, tag = self._check_peer("isend", peer, tag)
        return self.start("isend", self._array("isend", x), peer, tag)

    def irecv(self, x: Any, peer: int, tag: int) -> Work:
        peer, tag = self._check_peer("irecv", peer, tag)
        return self.start("irecv", self._array("irecv", x), peer, tag)

    def _check_peer(self, operation: str, peer: int, tag: int) -> tuple[int, int]:
        """`peer` and `tag` as ints. TypeError if they are not integers, ValueError if they are not a rank here or a valid tag."""
        self._queue.progress.pending()  # raises if the communicator was freed
        try:
            if peer is True or peer is False or tag is True or tag is False:  # a mistake that `index` accepts
                raise TypeError
            peer, tag = index(peer), index(tag)
        except TypeError:
            raise TypeError(f"{operation}: peer {peer!r}, tag {tag!r}; expected two integers") from None
        if not 0 <= peer < self._size:
            raise ValueError(f"{operation}: peer {peer} is outside the {self._size} ranks of this communicator")
        if not 0 <= tag < _NUM_USER_TAGS:
            raise ValueError(f"{operation}: tag {tag}; expected 0 to {_NUM_USER_TAGS - 1}")
        if self.in_flight.transfers:
            self.in_flight.look()
        return peer, tag

    def _array(self, operation: str, x: Any) -> Buffer:
        """The array that `operation` sends or receives. In checked mode ValueError if an unfinished operation uses it."""
        b = Buffer(x, "x", write_only=operation[-4:] == "recv")
        if self._checked:
            unfinished.refuse(operation, (b,))
        return b

    def _receive(self, b: Buffer, peer: int, tag: int) -> Any:
        from mpi4py import MPI

        flat = self._reach(b)
        with self._log.enter_pair("recv", peer, tag, b.size, b.dtype.name):
            status = MPI.Status()
            incoming = None
            while self._queue.progress.pending() and incoming is None:
                incoming = self._mpi.Improbe(peer, _USER_TAG + tag, status)
                self._queue.progress.advance()
            if incoming is None:
                incoming = self._mpi.Mprobe(peer, _USER_TAG + tag, status)
            nbytes = status.Get_elements(MPI.BYTE)
            if nbytes != flat.nbytes:
                # Receive the message all the same, so that a later `recv` does not match it.
                incoming.Recv(self._describe(np.empty(nbytes, np.uint8)))
                raise ValueError(f"recv: rank {peer} sent {nbytes} bytes, but x has {flat.nbytes}")
            incoming.Recv(self._describe(flat))
        return b.result()

    def start(self, operation: str, b: Buffer, peer: int, tag: int) -> Work:
        """Begin an `isend` or an `irecv`."""
        from mpi4py import MPI

        status, sends, flat = MPI.Status(), operation == "isend", self._reach(b)

        def end(error: Exception | None) -> Any:
            nbytes = flat.nbytes if sends or error else status.Get_elements(MPI.BYTE)
            if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise ValueError(f"irecv: rank {peer} sent more than the {nbytes} bytes of x") from None
            if error is not None:
                raise error
            if nbytes != flat.nbytes:
                raise ValueError(f"irecv: rank {peer} sent {nbytes} bytes, but x has {flat.nbytes}")
            return b.result()

        entry = self._log.enter_pair(operation, peer, tag, b.size, b.dtype.name)
        with entry.failing():
            start = self._mpi.Isend if sends else self._mpi.Irecv
            request = start(self._describe(flat), peer, _USER_TAG + tag)
        if peer == self._rank:
            self._to_self[tag] += 1 if sends else -1
        entry.issued()
        work = Transfer(self._queue.progress, self.in_flight, entry, request, status, end)
        if self._checked:
            unfinished.note(work, operation, (b,))
        return work


class InFlight:
    """The unfinished messages of a communicator. MPI reads and writes their arrays even after the program has dropped the Work."""

    def __init__(self) -> None:
        self.transfers: set[Transfer] = set()
        self._look_at = 0

    def add(self, transfer: "Transfer") -> None:
        self.transfers.add(transfer)
        _in_flight.add(transfer)

    def remove(self, transfer: "Transfer") -> None:
        self.transfers.discard(transfer)
        _in_flight.discard(transfer)

    def look(self) -> None:
        """Remove ended messages. Looks only if they are few, or twice as many as after the last look: cheap on average."""
        if len(self.transfers) <= _FEW or len(self.transfers) >= self._look_at:
            for transfer in tuple(self.transfers):
                transfer.look()
            self._look_at = 2 * len(self.transfers)

    def finish(self) -> None:
        """Wait for all messages; their errors are raised by their `wait()`."""
        for transfer in tuple(self.transfers):
            transfer._finish()


_FEW = 8
_in_flight: set["Transfer"] = set()  # of all communicators, also of those that the program has dropped


class Transfer(Work):
    """An unfinished message, the result of `isend` and `irecv`."""

    def __init__(
        self,
        progress: Progress,
        in_flight: InFlight,
        entry: Entry,
        request: Any,
        status: Any,
        end: Callable[[Exception | None], Any],
    ) -> None:
        """`in_flight` keeps the Transfer until the message has ended. `entry`: its entry in the flight record.

        `end(error)` returns the result when the message has ended, or raises; it keeps the array alive until then."""
        super().__init__()
        self._progress, self._entry, self._site = progress, entry, issued_here()
        self._request, self._status, self._through = request, status, end
        self._in_flight = in_flight
        self._polling = threading.Lock()  # in MPI only one thread at a time may test or wait for a request
        in_flight.add(self)

    def done(self) -> bool:
        """Whether the message has ended."""
        if not self._ended:
            self._progress.advance()
            self.look()
        self.is_known = self._ended
        return self._ended

    def look(self) -> None:
        """Ask MPI whether the message has ended, and note it."""
        if not self._ended and self._polling.acquire(blocking=False):
            try:
                self._poll(waits=False)
            finally:
                self._polling.release()

    def _finish(self) -> None:
        self._site.carry_out(self._wait_for_peer)

    def _wait_for_peer(self) -> None:
        self._progress.pending()  # raises in a forked child, which may have inherited the lock while another thread held it
        with self._polling:
            if self._ended:
                return
            self._entry.wait()
        while self._progress.pending() and not self.done():
            pass
        with self._polling:
            self._poll(waits=True)

    def _poll(self, *, waits: bool) -> None:
        if self._ended:  # another thread has noted the end
            return
        error = None
        try:
            if not (self._request.Wait if waits else self._request.Test)(self._status):
                return
        except Exception as raised:
            error = raised
        self._end(lambda: self._through(error))
        self._entry.leave(ENDED if self._error is None else FAILED)
        self._in_flight.remove(self)
        del self._request, self._through
