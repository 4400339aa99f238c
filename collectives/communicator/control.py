"""Control messages between all ranks: barriers, small Python objects, and errors that all ranks raise. Never data.

[Note: objects] A rank whose object cannot be pickled sends the error in its place, so that all ranks raise it and none waits. To
unpickle an object runs code of its classes, which may fail on some ranks alone. So the ranks tell each other afterwards whether it
failed, but not of objects without classes (numbers, text, tuples, lists, dicts), which cannot fail. mpi4py's `MPI.pickle` may have
other functions than pickle's, such as cloudpickle's: then the ranks tell each other of every object.
"""

import gc
import io
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from collectives import diagnosis
from collectives.communicator.arguments import rank_of
from collectives.communicator.transports import Transports
from collectives.diagnosis.recorder import Recorder
from collectives.diagnosis.together import Report, joined, raised_on, report_of
from collectives.progress.arrived import Arrived
from collectives.progress.queue import AsyncQueue
from collectives.progress.work import Work
from collectives.transports.node.meeting import IN_ORDER


class Control:
    """The control messages of one communicator, whose methods calls.py explains."""

    def __init__(
        self,
        mpi: Any,
        *,
        recorder: Recorder,
        queue: AsyncQueue,
        transports: Transports,
        on_progress: "Callable[[], Control]",
    ) -> None:
        """`on_progress()`: the Control that carries out asynchronous barriers: this one, or its twin for the progress thread."""
        self._mpi, self._recorder, self._queue = mpi, recorder, queue
        self._size: int = mpi.size  # stored, because a freed communicator has no size
        self._rank: int = mpi.rank
        self._transports, self._on_progress = transports, on_progress

    def barrier(self) -> None:
        self._queue.flush()
        with self._recorder.enter("barrier"):
            self._mpi.Barrier()

    def issue_barrier(self) -> Work:
        self._queue.progress.pending()  # raises if the communicator was freed
        shared = self._transports.shared
        if IN_ORDER and shared is not None and not self._recorder.checked:
            return Arrived(shared.posts.barriers, self._recorder.log.enter("barrier"), self._queue.progress)
        return self._queue.issue(self._on_progress().barrier, "barrier")

    def broadcast_object(self, obj: Any, root: int) -> Any:
        root = rank_of("broadcast_object", root, self._size)
        self._queue.flush()
        with self._recorder.enter("broadcast_object", root=root):
            mine, error = _pickled(obj) if self._rank == root else (None, None)
            sent = self._mpi.bcast(mine, root)
            self._raise_together("broadcast_object", {root: sent}, error)
            return self._unpickled("broadcast_object", {root: sent})[0]

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._queue.flush()
        with self._recorder.enter("all_gather_object"):
            mine, error = _pickled(obj)
            sent = dict(enumerate(self._mpi.allgather(mine)))
            self._raise_together("all_gather_object", sent, error)
            return self._unpickled("all_gather_object", sent)

    def _raise_together(self, doing: str, sent: "Mapping[int, bytes | Report | None]", error: Exception | None) -> None:
        """Raise the errors that ranks have sent, by rank. `error`: that of this rank."""
        reports = [each if isinstance(each := sent.get(rank), tuple) else None for rank in range(self._size)]
        with joined(lambda _: reports, doing, partial(raised_on, self._mpi)):
            if error is not None:
                raise error

    def _unpickled(self, doing: str, sent: Mapping[int, bytes]) -> list[Any]:
        """The objects that ranks have sent, by rank: see [Note: objects]."""
        loaders = {rank: _loader(data) for rank, data in sent.items()}
        found: list[Any] = []
        error, report = None, None
        for rank, loader in loaders.items():
            try:
                found.append(loader.load())
            except Exception as raised:
                error, report = raised, report_of(raised, f"the object of rank {rank} cannot be unpickled")
                break
        if any(loader.has_classes for loader in loaders.values()):
            self._raise_together(doing, dict(enumerate(self._mpi.allgather(report))), error)
        elif error is not None:
            raise error
        return found

    def together(self, doing: str) -> AbstractContextManager[None]:
        self._queue.flush()
        if self._recorder.checked:
            self._recorder.enter("together").leave()  # without `doing`, which may differ between the ranks
        return diagnosis.together(self._mpi, doing, self._recorder.log)


class _Loader(pickle.Unpickler):
    """`has_classes`: whether it has met a class or a function."""

    has_classes = False

    def find_class(self, module: str, name: str) -> Any:
        self.has_classes = True
        return super().find_class(module, name)


class _OtherLoader:
    """Unpickles by the functions that the program has given `MPI.pickle`."""

    has_classes = True  # perhaps

    def __init__(self, data: bytes) -> None:
        self._data = data

    def load(self) -> Any:
        from mpi4py import MPI

        return MPI.pickle.loads(self._data)


def _loader(data: bytes) -> _Loader | _OtherLoader:
    from mpi4py import MPI

    # MPI.pickle has no attribute that tells its function.
    return _Loader(io.BytesIO(data)) if pickle.loads in gc.get_referents(MPI.pickle) else _OtherLoader(data)


def _pickled(obj: Any) -> "tuple[bytes | Report, Exception | None]":
    """What is sent for an object, and the error that it stands for."""
    try:
        from mpi4py import MPI

        return MPI.pickle.dumps(obj), None
    except Exception as error:
        return report_of(error, "the object cannot be pickled"), error
