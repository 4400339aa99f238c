"""Sends copies to ranks of another node while the training goes on, so that the state survives the loss of a whole node."""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np

from collectives import Communicator, Work
from mpitrain.elastic.copies.files import CopyFile, path_of

_CHUNK_BYTES = 4 << 20
_NAP_S = 2e-3  # between two looks at a transfer: MPI would otherwise wait with a busy core


def partner_of(rank: int, nodes: Sequence[Sequence[int]]) -> int:
    """The rank that keeps the copy of `rank`: on the next node, with the same number there if it has so many. `nodes`: their ranks."""
    node = next(index for index, ranks in enumerate(nodes) if rank in ranks)
    there = nodes[(node + 1) % len(nodes)]
    return there[nodes[node].index(rank) % len(there)]


class Partners:
    """The transfers of this rank's copies to its partner, and of the copies that it keeps for others."""

    def __init__(self, comm: Communicator, run: str, epoch: int) -> None:
        """Collective. The ranks of `comm` are on several nodes."""
        by_leader: dict[int, list[int]] = {}
        for rank, leader in enumerate(comm.all_gather_object(comm.node.broadcast_object(comm.rank))):
            by_leader.setdefault(leader, []).append(rank)
        partners = [partner_of(rank, list(by_leader.values())) for rank in range(comm.size)]
        self._comm = comm.split(0)  # of the thread
        self._partner = partners[comm.rank]
        self._kept_for = [rank for rank, partner in enumerate(partners) if partner == comm.rank]
        self._run, self._epoch = run, epoch
        self._files: dict[tuple[int, int], CopyFile] = {}  # by rank and generation
        self._waiting: SimpleQueue[tuple[int, bytes, np.ndarray] | None] = SimpleQueue()
        self._done = [threading.Event() for _ in range(2)]  # of each generation: it may be written again
        for event in self._done:
            event.set()
        self._error: Exception | None = None
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._transfer, name="mpitrain-copies", daemon=True)
        self._thread.start()

    def wait(self, generation: int) -> None:
        """Wait until the last copy of a generation was sent. Raises the error of the thread."""
        self._done[generation].wait()
        if self._error is not None:
            raise self._error

    def send(self, generation: int, header: bytes, data: np.ndarray) -> None:
        """Begin to send a copy, which stays unchanged until `wait`."""
        self._done[generation].clear()
        self._waiting.put((generation, header, data))

    def close(self, *, remove: bool) -> None:
        """End the thread after the transfers so far, unless a loss has ended it."""
        self._waiting.put(None)
        self._thread.join()
        for file in self._files.values():
            file.remove() if remove else file.close()
        if self._error is None:
            self._comm.free()

    def _transfer(self) -> None:
        while (copy := self._waiting.get()) is not None:
            generation = copy[0]
            try:
                if self._error is None:
                    self._exchange(*copy)
            except Exception as error:  # a rank was lost, or node memory is full
                self._error = error
            finally:
                self._done[generation].set()
            del copy

    def _exchange(self, generation: int, header: bytes, data: np.ndarray) -> None:
        comm = self._comm
        lengths = np.array([len(header), data.nbytes], np.int64)
        theirs = {rank: np.zeros(2, np.int64) for rank in self._kept_for}
        self._finish([comm.isend(lengths, self._partner), *(comm.irecv(theirs[rank], rank) for rank in theirs)])
        incoming: dict[int, tuple[CopyFile, np.ndarray, np.ndarray]] = {}
        for rank, (header_bytes, nbytes) in ((rank, map(int, its)) for rank, its in theirs.items()):
            file = self._files.get((rank, generation))
            if file is None or not file.fits(nbytes, header_bytes):
                if file is not None:
                    file.remove()
                path = path_of(self._run, self._epoch, rank, generation, for_partner=True)
                file = self._files[rank, generation] = CopyFile(path, nbytes, header_bytes)
            file.begin()
            incoming[rank] = file, np.empty(header_bytes, np.uint8), file.data(nbytes)
        self._finish(
            [
                comm.isend(np.frombuffer(bytearray(header), np.uint8), self._partner),
                *(comm.irecv(its, rank) for rank, (_, its, _) in incoming.items()),
            ]
        )
        longest = max(data.nbytes, *(its.nbytes for _, _, its in incoming.values())) if incoming else data.nbytes
        for at in range(0, longest, _CHUNK_BYTES):
            works = [
                comm.irecv(its[at : at + _CHUNK_BYTES], rank)
                for rank, (_, _, its) in incoming.items()
                if at < its.nbytes
            ]
            if at < data.nbytes:
                works.append(comm.isend(data[at : at + _CHUNK_BYTES], self._partner))
            self._finish(works)
        for file, its_header, its in incoming.values():
            file.finish(its_header.tobytes(), its.nbytes)
        self.num_bytes += len(header) + data.nbytes

    @staticmethod
    def _finish(works: list[Work]) -> None:
        while not all(work.done() for work in works):
            time.sleep(_NAP_S)
        for work in works:
            work.wait()
