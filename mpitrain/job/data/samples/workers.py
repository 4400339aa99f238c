"""Worker processes of DataLoaders: plain programs, which know nothing of the launcher and end with their rank.

A forked worker inherits the state of MPI, of its threads and of its network hardware, and crashes or hangs (pytorch#13787,
horovod#2898). So workers are started by spawn. A spawned process with the launcher's variables would start MPI as the rank itself, if
anything in it starts MPI.
"""

import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from collectives.launcher import LAUNCHER_PREFIXES
from collectives.processes import end_by_parent_alone, helpers_start
from mpitrain.job.data.samples.rows import SampleRows

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, IterableDataset


@contextmanager
def launcher_variables_dropped() -> Iterator[None]:
    """A block in which this process starts workers: multiprocessing gives them the environment that the process has itself.

    MPI reads its variables when it starts, and the block is short.
    """
    dropped = {name: value for name, value in os.environ.items() if name.startswith(LAUNCHER_PREFIXES)}
    for name in dropped:
        del os.environ[name]
    try:
        with helpers_start():
            yield
    finally:
        os.environ.update(dropped)


@contextmanager
def deaths_of_workers() -> Iterator[None]:
    """A block whose error about a dead worker of a DataLoader names the signal, or the exit status, and whose error of a worker is one
    line: torch adds the worker's stack."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not str(error).startswith("Caught "):
            raise
        line = str(error).strip().rpartition("\n")[2]
        raise type(error)(line.partition(": ")[2] or line) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise RuntimeError(f"a worker process has died: {str(error.__cause__ or error).strip()}") from error


def started(rows: SampleRows, num_workers: int) -> Iterator[Any]:
    """What `rows` yields, made ahead by worker processes. They end when nobody refers to the iterator any more.

    TypeError if the dataset cannot be sent to a process.
    """
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    IterableDataset.register(SampleRows)  # type: ignore[type-abstract]  # instead of a base class: rows.py is imported without torch
    loader = DataLoader(
        cast("IterableDataset[Any]", rows),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        multiprocessing_context="spawn",
        worker_init_fn=_end_with_the_rank,
        generator=torch.Generator(),  # else the loader draws from the generator of the training
    )
    try:
        with launcher_variables_dropped(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Got pickle error")  # it advises to fork
            return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"batches: workers are started by spawn, and this dataset or collate cannot be pickled for them: {error}; define its "
            "classes and functions at the top of a module, or pass workers=0"
        ) from error


def check_start(loader: "DataLoader[Any]") -> None:
    """ValueError if a DataLoader would fork its workers. Else they will end with their rank, and only with it."""
    if not loader.num_workers:
        return
    context = loader.multiprocessing_context
    fixed = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    method = fixed if context is None else context.get_start_method()
    if method == "fork":
        raise ValueError(
            f"batches: the DataLoader forks its {loader.num_workers} workers, and forked workers crash under MPI; "
            'make it with multiprocessing_context="spawn"'
        )
    if not isinstance(loader.worker_init_fn, _Init):
        loader.worker_init_fn = _Init(loader.worker_init_fn)


class _Init:
    """The first call in a worker of a loader that the user has made, and then the user's own."""

    def __init__(self, own: Callable[[int], object] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        _end_with_the_rank(worker)
        if self._own is not None:
            self._own(worker)


def _as_it_is(item: Any) -> Any:
    return item


def _end_with_the_rank(worker: int) -> None:
    """End this worker at once when its rank dies, and not by signals that ask the ranks to stop.

    torch looks every 5 s, and not while a full queue blocks the worker.
    """
    end_by_parent_alone()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
