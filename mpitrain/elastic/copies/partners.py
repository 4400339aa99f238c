"""Sends copies to ranks of another node while the training goes on, so that the state survives the loss of a whole node.

The copies go by TCP, not by MPI. The kernel sends and receives while the ranks compute, without polls that take their cores. And with
two threads in MPI at the same time, Open MPI 5.0.11 has left an all-reduce unfinished on one rank.
"""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import numpy as np

from collectives import Communicator
from collectives.diagnosis.ring.links import Listener, Place, connect
from mpitrain.elastic.copies.files import CopyFile, path_of

_HEAD = struct.Struct("<QQQ")  # of a message: generation, bytes of the header, bytes of the data
_DONE = b"d"  # the answer to a copy
_TAG = 32001  # of the waits for a partner in the flight record
_ABANDON_S = 5.0  # for the threads to end after a loss


def partner_of(rank: int, nodes: Sequence[Sequence[int]]) -> int:
    """The rank that keeps the copy of `rank`: on the next node, with the same number there if it has so many. `nodes`: their ranks."""
    node = next(index for index, ranks in enumerate(nodes) if rank in ranks)
    there = nodes[(node + 1) % len(nodes)]
    return there[nodes[node].index(rank) % len(there)]


class Partners:
    """The transfers of this rank's copies to its partner, and of the copies that it keeps for others.

    `unreached`: on all ranks the number of ranks that cannot connect to their partner, whose copies stay on their own node.
    """

    def __init__(self, comm: Communicator, run: str, epoch: int) -> None:
        """Collective. The ranks of `comm` are on several nodes."""
        partners = [partner_of(rank, comm.nodes) for rank in range(comm.size)]
        self._comm, self._partner = comm, partners[comm.rank]
        self._run, self._epoch = run, epoch
        self._files: dict[tuple[int, int], CopyFile] = {}  # by rank and generation
        self._waiting: SimpleQueue[tuple[int, bytes, np.ndarray] | None] = SimpleQueue()
        self._done = threading.Event()  # the partner has all copies so far
        self._done.set()
        self._error: OSError | None = None
        self.num_bytes = 0

        self._out: socket.socket | None = None
        self._in: dict[int, socket.socket] = {}
        listeners = {rank: Listener(local=False) for rank, partner in enumerate(partners) if partner == comm.rank}
        try:
            places = comm.all_gather_object({rank: tuple(listener.place) for rank, listener in listeners.items()})
            self._out = connect(Place(*places[partners[comm.rank]][comm.rank]))
            reached = comm.all_gather_object(self._out is not None)
        except BaseException:  # a rank was lost
            for listener in listeners.values():
                listener.close(expected=False)
            self._close_links()
            raise
        self.unreached = reached.count(False)
        for rank, listener in listeners.items():
            if (made := listener.close(expected=reached[rank])) is not None:
                self._in[rank] = made
        for link in self._links():
            link.settimeout(None)
            # No limit for the partner: it may take long to reserve memory. The monitors notice a silent host and, at the deadline, a
            # partner that stands still.
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._threads = [threading.Thread(target=self._send, name="mpitrain-copies", daemon=True)]
        self._threads += [
            threading.Thread(target=self._keep, args=each, name="mpitrain-copies", daemon=True)
            for each in self._in.items()
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait until the partner has all copies so far. OSError if the connection was lost, or this rank's node memory was full.

        In the last case this rank has received the copies all the same, so that no other rank waits for it.
        """
        self._comm.expect(self._partner, _TAG, self._done.wait)
        if self._error is not None:
            raise self._error

    def send(self, generation: int, header: bytes, data: np.ndarray) -> None:
        """Begin to send a copy, which stays unchanged until `wait`."""
        if self._out is not None:
            self._done.clear()
            self._waiting.put((generation, header, data))

    def close(self, *, remove: bool) -> None:
        """End the threads after the transfers so far. Collective."""
        self._waiting.put(None)
        for rank, thread in zip((self._partner, *self._in), self._threads, strict=True):
            self._comm.expect(rank, _TAG, thread.join)
        for file in self._files.values():
            file.remove() if remove else file.close()
        self._files.clear()
        self._close_links()

    def abandon(self) -> None:
        """End the threads and their transfers, because this rank has failed, or others were lost. The files stay. Not collective."""
        self._waiting.put(None)
        self._close_links()
        for thread in self._threads:
            thread.join(_ABANDON_S)
        for file in self._files.values():
            file.close()

    def _links(self) -> list[socket.socket]:
        return [*self._in.values(), *([] if self._out is None else [self._out])]

    def _close_links(self) -> None:
        for link in self._links():
            with suppress(OSError):  # the other side has ended
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _send(self) -> None:
        """The thread that sends this rank's copies, one after the other."""
        while (copy := self._waiting.get()) is not None:
            generation, header, data = copy
            assert self._out is not None
            try:
                self._out.sendall(_HEAD.pack(generation, len(header), data.nbytes))
                self._out.sendall(header)
                self._out.sendall(data.data)
                if self._out.recv(1) != _DONE:
                    raise ConnectionResetError("the rank that keeps the copies of this rank has ended")
                self.num_bytes += len(header) + data.nbytes
            except OSError as error:
                self._error = error
            del copy, data
            self._done.set()
        if self._out is not None:
            with suppress(OSError):
                self._out.shutdown(socket.SHUT_WR)  # so that the thread of the partner ends

    def _keep(self, rank: int, link: socket.socket) -> None:
        """The thread that receives the copies of a rank, until that rank ends."""
        with _ending(link):
            while len(head := _received(link, bytearray(_HEAD.size))) == _HEAD.size:
                generation, header_bytes, nbytes = _HEAD.unpack(head)
                header = _received(link, bytearray(header_bytes))
                file = self._file(rank, generation, nbytes, header_bytes)
                data = np.empty(nbytes, np.uint8) if file is None else file.data(nbytes)
                if len(_received(link, data.data)) < nbytes:
                    return
                if file is not None:
                    file.finish(bytes(header), nbytes)
                del data, file
                link.sendall(_DONE)

    def _file(self, rank: int, generation: int, nbytes: int, header_bytes: int) -> CopyFile | None:
        """The file for a copy of `rank`, marked as incomplete; None if node memory is full, which `wait` reports."""
        file = self._files.get((rank, generation))
        if file is None or not file.fits(nbytes, header_bytes):
            if file is not None:
                self._files.pop((rank, generation)).remove()
            path = path_of(self._run, self._epoch, rank, generation, for_partner=True)
            try:
                file = self._files[rank, generation] = CopyFile(path, nbytes, header_bytes)
            except OSError as error:
                self._error = error
                return None
        file.begin()
        return file


@contextmanager
def _ending(link: socket.socket) -> Iterator[None]:
    """End the connection after the block, however it ends: else the other rank would wait for an answer."""
    try:
        with suppress(OSError):  # the other rank was lost
            yield
    finally:
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def _received(link: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    """Fill `into` from a connection; returns the part that was filled before its end."""
    view, at = memoryview(into), 0
    while at < len(view) and (count := link.recv_into(view[at:])):
        at += count
    return into if at == len(view) else view[:at]
