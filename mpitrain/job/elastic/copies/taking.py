"""Takes the copies of a rank, every few steps."""

import mmap
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from ckpt.tensors import inspect
from collectives import Communicator
from collectives.environment import memory_folder
from collectives.texts import show_bytes
from collectives.transports.node.memory import remedy, room
from mpitrain.job.elastic.copies.files import (
    CopyFile,
    Header,
    complete_copies,
    oldest_epoch,
    parts_of,
    path_of,
    remove_copies,
)
from mpitrain.job.elastic.copies.partners import Partners

_NUM_GENERATIONS = 2
_HEADER_BYTES = 200  # for a tensor


class StateCopies:
    """The copies of the ranks of `comm` in one epoch of the run `run`.

    Copies are a rank's own alone on one node. On several nodes a thread also sends each copy to a rank of the next node, while the
    training goes on.
    """

    def __init__(self, comm: Communicator, run: str, epoch: int) -> None:
        """Collective."""
        self._comm, self._run, self._epoch = comm, run, epoch
        self._files: list[CopyFile | None] = [None] * _NUM_GENERATIONS
        self._making: threading.Thread | None = None
        self._is_abandoned = False
        self._error: OSError | None = None
        self._num_taken = 0
        self._partners = Partners(comm, run, epoch) if comm.num_nodes > 1 else None
        self.is_prepared = False
        self.seconds = 0.0
        """The time for which copies have held up the training."""

    @property
    def num_unreached(self) -> int:
        """The number of ranks whose copies stay on their own node, because they cannot connect to their partner."""
        return 0 if self._partners is None else self._partners.unreached

    @property
    def link_bytes(self) -> int:
        """Bytes that this rank has sent to another node."""
        return 0 if self._partners is None else self._partners.num_bytes

    def prepare(self, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Begin to reserve the memory for states like this one, in a thread, because this takes several times as long as a copy.

        Where copies of an earlier epoch take memory, this is the memory of one generation. The second copy makes the other one, when
        the earlier copies are gone. Collective. OSError on all ranks if a node has too little memory.
        """
        self.is_prepared = True
        _, _, nbytes = parts_of(inspect(tensors), whole=self._comm.rank == 0)
        header_bytes = len(msgspec.json.encode(meta)) + _HEADER_BYTES * len(tensors)
        self._check_room((nbytes + header_bytes) * self._num_at_once() * (1 if self._partners is None else 2))

        def make() -> None:
            try:
                for generation in range(self._num_at_once()):
                    if self._is_abandoned:
                        return
                    self._files[generation] = file = CopyFile(self._path(generation), nbytes, header_bytes)
                    file.data(nbytes)[:: mmap.PAGESIZE] = 0  # the first touch of a page takes longer than a copy of it
            except OSError as error:
                self._error = error

        self._making = threading.Thread(target=make, name="mpitrain-copies-memory", daemon=True)
        self._making.start()

    def _check_room(self, nbytes: int) -> None:
        """`nbytes`: what this rank and its partner need."""
        (needed,) = self._comm.node.all_reduce(np.array([nbytes], np.float64))
        with self._comm.together():
            if needed > (free := room()):
                raise OSError(
                    f"expected {show_bytes(int(needed))} of node memory in {memory_folder()}, and {show_bytes(free)} are free: "
                    f"{remedy(int(needed))}"
                )

    def take(self, step: int, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Copy the state after `step` steps, in the form of `ckpt.save`. All ranks of the communicator call this.

        OSError on all ranks if node memory is full.
        """
        began = time.perf_counter()
        self.is_prepared = True  # a later `prepare` would write into the first copy
        generation = self._num_taken % _NUM_GENERATIONS
        parts, arrays, nbytes = parts_of(inspect(tensors), whole=self._comm.rank == 0)
        header = msgspec.json.encode(
            Header(step, self._epoch, self._comm.rank, self._comm.size, nbytes, tuple(parts), dict(meta))
        )
        # The older generation is overwritten only after the newer one is complete on all ranks, and at their partners.
        with self._comm.together("copies of the state in node memory"):
            if self._partners is not None:
                self._partners.wait()
            if self._num_taken != 1:
                file = self._file(generation, nbytes, len(header))
        if self._num_taken == 1:
            # All ranks, and their partners, have completed the first copy of this epoch: the copies before it are of no use.
            with self._comm.together("copies of the state in node memory"):
                if self._comm.node.rank == 0:
                    remove_copies(self._run, before_epoch=self._epoch)
            with self._comm.together("copies of the state in node memory"):
                file = self._file(generation, nbytes, len(header))
        file.begin()
        data = file.data(nbytes)
        for part, array in zip(parts, arrays, strict=True):
            target = data[part.at : part.at + array.nbytes].view(array.dtype)
            target[...] = array.reshape(-1)
        file.finish(header, nbytes)
        if self._partners is not None:
            self._partners.send(generation, header, data)
        self._num_taken += 1
        self.seconds += time.perf_counter() - began

    def _end_making(self) -> None:
        if self._making is not None:
            self._making.join()
            self._making = None
        if self._error is not None:
            raise self._error

    def close(self, *, remove: bool) -> None:
        """End the copies. `remove`: they are no longer needed, because a checkpoint has their state. Collective."""
        with suppress(OSError):
            self._end_making()
        if self._partners is not None:
            self._partners.close(remove=remove)
        for file in self._files:
            if file is not None:
                file.remove() if remove else file.close()
        if remove and self._comm.node.rank == 0:
            # No later ones: another rank may be making them already.
            remove_copies(self._run, before_epoch=self._epoch + 1)

    def give_up(self) -> None:
        """End the copies, because node memory is full. Collective.

        Complete ones stay, also of earlier epochs, until a checkpoint has a later state.
        """
        self.close(remove=False)
        self._comm.barrier()  # the thread of another rank may be completing a copy on this node
        if self._comm.node.rank == 0:
            remove_copies(self._run, but={str(found.path) for found in complete_copies(self._run)})

    def abandon(self) -> None:
        """End the copies after a loss of ranks, or an error of this rank. The files stay. Not collective."""
        self._is_abandoned = True
        if self._partners is not None:
            self._partners.abandon()
        with suppress(OSError):
            self._end_making()  # else it would take memory from the next attempt
        for file in self._files:
            if file is not None:
                file.close()

    def _file(self, generation: int, nbytes: int, header_bytes: int) -> CopyFile:
        """The file of a generation. The first copy makes both if it can, so that a full node memory is found at once."""
        if self._num_taken == 0:
            self._end_making()
            for each in range(self._num_at_once()):
                if self._files[each] is None:
                    self._files[each] = CopyFile(self._path(each), nbytes, header_bytes)
        file = self._files[generation]
        if file is None or not file.fits(nbytes, header_bytes):
            if file is not None:
                file.remove()
            file = self._files[generation] = CopyFile(self._path(generation), nbytes, header_bytes)
        return file

    def _num_at_once(self) -> int:
        """The number of generations that this epoch may have on this node before its second copy."""
        return 1 if oldest_epoch(self._run) < self._epoch else _NUM_GENERATIONS

    def _path(self, generation: int) -> Any:
        return path_of(self._run, self._epoch, self._comm.rank, generation)
