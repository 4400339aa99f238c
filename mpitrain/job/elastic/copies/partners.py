"""Sends copies to ranks of another node while the training goes on, so that the state survives the loss of a whole node.

The copies go by TCP, not by MPI. The kernel sends and receives while the ranks compute, without polls that take their cores. And with
two threads in MPI at the same time, Open MPI 5.0.11 has left an all-reduce unfinished on one rank.
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import numpy as np

from collectives import Communicator
from collectives.diagnosis.ring.joining import join
from mpitrain.job.elastic.copies.files import CopyFile, path_of
from mpitrain.job.elastic.copies.transfers import ChangedError, Head, Transfers

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

        nodes = {rank: number for number, ranks in enumerate(comm.nodes) for rank in ranks}
        made = join(
            comm.mpi, comm.all_gather_object, [nodes[rank] for rank in range(comm.size)], dict(enumerate(partners))
        )
        self.unreached = made.reached.count(False)
        self._out = None if made.out is None else Transfers(made.out)
        self._in = {rank: Transfers(link) for rank, link in made.incoming.items()}
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
        return [each.socket for each in (*self._in.values(), self._out) if each is not None]

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
                self._out.send(generation, header, data.data)
                self.num_bytes += len(header) + data.nbytes
            except OSError as error:
                self._error = error
            del copy, data
            self._done.set()
        if self._out is not None:
            with suppress(OSError):
                self._out.socket.shutdown(socket.SHUT_WR)  # so that the thread of the partner ends

    def _keep(self, rank: int, link: Transfers) -> None:
        """The thread that receives the copies of a rank, until that rank ends."""
        with _ending(link.socket):
            try:
                while (head := link.head()) is not None:
                    self._keep_one(rank, link, head)
            except ChangedError as error:
                self._error = error

    def _keep_one(self, rank: int, link: Transfers, head: Head) -> None:
        file = self._file(rank, *head)
        data = np.empty(head.nbytes, np.uint8) if file is None else file.data(head.nbytes)
        header = link.body(head, data.data)
        if file is not None:
            file.finish(header, head.nbytes)
        del data, file
        link.answer()

    def _file(self, rank: int, generation: int, header_bytes: int, nbytes: int) -> CopyFile | None:
        """The file for a copy of `rank`, marked as incomplete; None if node memory is full, which `wait` reports."""
        file = self._files.get((rank, generation))
        if file is None or not file.fits(nbytes, header_bytes):
            if file is not None:
                self._files.pop((rank, generation)).remove()
            try:
                path = path_of(self._run, self._epoch, rank, generation, for_partner=True)
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
