"""Sends copies to ranks of another node while the training goes on, so that the state survives the loss of a whole node."""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np

from collectives import Communicator, Work
from mpitrain.elastic.copies.files import CopyFile, path_of

_CHUNK_BYTES = 4 << 20
_ABANDON_S = 5.0  # for the thread to end after a loss
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
        self._done = threading.Event()  # all copies so far were sent and received
        self._done.set()
        self._error: Exception | None = None
        self._is_cut = False  # whether the ranks can no longer exchange copies
        self._is_abandoned = False
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._transfer, name="mpitrain-copies", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all copies so far were sent, and those of others received. Raises the error of the thread.

        OSError if node memory was full. This rank has then received the copies all the same, so that no other rank waits for it.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error

    def send(self, generation: int, header: bytes, data: np.ndarray) -> None:
        """Begin to send a copy, which stays unchanged until `wait`."""
        self._done.clear()
        self._waiting.put((generation, header, data))

    def close(self, *, remove: bool) -> None:
        """End the thread after the transfers so far. Collective."""
        self._waiting.put(None)
        self._thread.join()
        for file in self._files.values():
            file.remove() if remove else file.close()
        self._files.clear()
        if not self._is_cut:
            self._comm.free()

    def abandon(self) -> None:
        """End the thread and its transfers, because this rank has failed, or others were lost. The files stay. Not collective."""
        self._is_abandoned = True
        self._waiting.put(None)
        self._thread.join(_ABANDON_S)
        for file in self._files.values():
            file.close()

    def _transfer(self) -> None:
        while (copy := self._waiting.get()) is not None:
            try:
                if not self._is_cut:
                    self._exchange(*copy)
            except Exception as error:  # a rank was lost
                self._error, self._is_cut = error, True
            del copy
            self._done.set()

    def _exchange(self, generation: int, header: bytes, data: np.ndarray) -> None:
        comm = self._comm
        lengths = np.array([len(header), data.nbytes], np.int64)
        theirs = {rank: np.zeros(2, np.int64) for rank in self._kept_for}
        self._finish([comm.isend(lengths, self._partner), *(comm.irecv(theirs[rank], rank) for rank in theirs)])
        incoming: dict[int, tuple[CopyFile | None, np.ndarray, np.ndarray]] = {}
        for rank, (header_bytes, nbytes) in ((rank, map(int, its)) for rank, its in theirs.items()):
            file = self._file(rank, generation, nbytes, header_bytes)
            data_there = np.empty(nbytes, np.uint8) if file is None else file.data(nbytes)
            incoming[rank] = file, np.empty(header_bytes, np.uint8), data_there
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
            if file is not None:
                file.finish(its_header.tobytes(), its.nbytes)
        self.num_bytes += len(header) + data.nbytes

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

    def _finish(self, works: list[Work]) -> None:
        while not all(work.done() for work in works):
            if self._is_abandoned:
                raise RuntimeError("the copies were given up")
            time.sleep(_NAP_S)
        for work in works:
            work.wait()
