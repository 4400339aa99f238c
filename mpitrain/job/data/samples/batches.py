"""`mpitrain.data.batches`: this rank's part of the global batches of a dataset."""

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import collectives
from ckpt.convert.formats import torch_archive
from collectives import Communicator, Mesh
from mpitrain.job.data.samples.randomness import generators_kept
from mpitrain.job.data.samples.rows import Collate, IterableRows, MapRows, SamplePlace, SampleRows, Share, set_epoch
from mpitrain.job.data.samples.workers import check_start, deaths_of_workers, launcher_variables_dropped, started

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_MAX_COUNT = 1 << 53
_DATA_AXES = ("dp_replicate", "dp_shard", "cp")


class SampleBatches(ABC):
    """This rank's batches, without end. `next` is collective: an error of a dataset on one rank is raised on all.

    Args:
        comm: all ranks of the job.
        data: the ranks that share a global batch.
    """

    def __init__(self, comm: Communicator, data: Communicator) -> None:
        self._comm, self._data = comm, data
        self.step = 0
        """The number of batches so far, those before a resume included."""

    def __iter__(self) -> "SampleBatches":
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """This rank's part of the next global batch. Collective."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch, of numbers and text, for the `meta` of `mpitrain.save`. Collective."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch of a state. Collective; ValueError on all ranks if it is the state of other batches."""


class DatasetBatches(SampleBatches):
    """The batches of a dataset whose samples `rows` divides between the ranks. Its state is a place, at any number of ranks.

    `num_repeated`: with slices, the last rounds of a step that run the first slice again.
    """

    def __init__(
        self, rows: SampleRows, comm: Communicator, data: Communicator, *, workers: int, num_repeated: int = 0
    ) -> None:
        super().__init__(comm, data)
        self._rows, self._num_workers, self._num_repeated = rows, workers, num_repeated
        self._place = rows.place
        self._iterator: Iterator[tuple[SamplePlace, Any]] | None = None

    def __next__(self) -> Any:
        try:
            with self._comm.together("reading a batch"), deaths_of_workers():
                place, batch = self._read()
        except BaseException:
            self._iterator = None  # it may have passed a batch that other ranks do not have
            raise
        self._place, self.step = place, self.step + 1
        return [*batch, *batch[:1] * self._num_repeated] if self._rows.share.is_sliced else batch

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, **self._place._asdict(), **self._order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._comm.together():
            for name, now in self._order().items():
                if state.get(name) != now:
                    raise ValueError(
                        f"batches: the state was saved with {name} {state.get(name)}, got {now}: the samples would be others; "
                        "pass the same dataset and settings"
                    )
            step, epoch, sample = (_count(state, name) for name in ("step", "epoch", "sample"))
        self._iterator = None
        self.step, self._place = step, SamplePlace(epoch, sample)

    def _order(self) -> dict[str, Any]:
        """What decides which sample a place means."""
        rows = self._rows
        if isinstance(rows, MapRows):
            return {"kind": "map", "seed": rows.seed, "samples": rows.num_samples, "shuffle": rows.is_shuffled}
        return {"kind": "iterable", "seed": rows.seed}

    def _read(self) -> tuple[SamplePlace, Any]:
        # A worker has generators of its own; in this process the training draws from them.
        with nullcontext() if self._num_workers else generators_kept():
            if self._iterator is None:
                self._rows.place = self._place
                self._iterator = started(self._rows, self._num_workers) if self._num_workers else iter(self._rows)
            return next(self._iterator)


class LoaderBatches(SampleBatches):
    """The batches of a StatefulDataLoader, which are this rank's own. Its state has one entry for each rank."""

    def __init__(self, loader: Any, comm: Communicator, data: Communicator) -> None:
        super().__init__(comm, data)
        self._loader, self._epoch = loader, 0
        self._iterator: Iterator[Any] | None = None
        self._is_resumed = False

    def __next__(self) -> Any:
        with self._comm.together("reading a batch"), deaths_of_workers():
            batch = self._read()
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        with self._comm.together("state_dict"), launcher_variables_dropped():  # it may start the workers
            state = _packed(self._loader.state_dict())
        states = self._data.all_gather_object(state)
        return {"step": self.step, "kind": "StatefulDataLoader", "epoch": self._epoch, "ranks": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._comm.together():
            if (kind := state.get("kind")) != "StatefulDataLoader":
                raise ValueError(f"batches: expected the state of a StatefulDataLoader, got one of the kind {kind!r}")
            if not isinstance(of_ranks := state.get("ranks"), list):
                raise ValueError(f"batches: the state has no list of the ranks' states, but {of_ranks!r:.100}")
            step, epoch = _count(state, "step"), _count(state, "epoch")
            if (num := len(of_ranks)) != self._data.size:
                raise ValueError(
                    f"batches: the state of a StatefulDataLoader is of {num} data ranks, got {self._data.size}: each has a place of "
                    f"its own; start {num}, or pass the dataset itself, which goes on at any number"
                )
            self._iterator = None
            self._loader.load_state_dict(_unpacked(of_ranks[self._data.rank]))
        self.step, self._epoch, self._is_resumed = step, epoch, True

    def _read(self) -> Any:
        while True:
            is_new = self._iterator is None
            if self._iterator is None:
                set_epoch((self._loader.sampler, self._loader.batch_sampler, self._loader.dataset), self._epoch)
                with launcher_variables_dropped():
                    self._iterator = iter(self._loader)
            try:
                return next(self._iterator)
            except StopIteration:
                if is_new and not self._is_resumed:
                    raise ValueError(f"batches: the StatefulDataLoader has no batches in epoch {self._epoch}") from None
                self._iterator, self._is_resumed = None, False  # a state may be that of an epoch's end
                self._epoch += 1


def batches(
    dataset: Any,
    mesh: Mesh | Communicator | None = None,
    *,
    batch: int | None = None,
    seed: int = 0,
    shuffle: bool | None = None,
    collate: Collate | None = None,
    workers: int = 0,
    slices: int = 0,
) -> SampleBatches:
    """The batches of a dataset for a training loop, without end. Each step gives this rank's part of the global batch. Collective.

        for images, labels in mpitrain.data.batches(dataset, mesh, batch=256): ...

    The global batch depends on the seed and the step alone: the parts of all ranks, in order, are the same samples at any number of
    ranks and workers. `state_dict()` is for the `meta` of `mpitrain.save`, and `load_state_dict` goes on at any number of ranks.

    Args:
        dataset: a map-style dataset (with `len` and `[index]`): each epoch has every sample once, in another order. Or an iterable
            dataset, which yields the same samples on each rank: sample k is row k % batch of step k // batch. Each rank reads all
            samples, and keeps its rows; a resume reads those before it in the epoch. Or torchdata's StatefulDataLoader: its batches are
            this rank's own, and its state goes on at the same number of ranks alone. The last two are iterated again and again, and
            told the number of each epoch by `set_epoch`, if they have it.
        mesh: of the model. The ranks along dp_replicate, dp_shard and cp share a global batch, the others get the same rows. A
            Communicator: all of its ranks share it; None: `collectives.world()`.
        batch: samples in a global batch. Without slices rank r of n has the rows batch * r // n to batch * (r + 1) // n - 1.
        seed: of the order, and of Python's, NumPy's and torch's generators of random numbers, which are seeded for each sample.
        shuffle: of a map-style dataset; None: True.
        collate: makes a batch of the samples of this rank, a list; None: torch's default_collate.
        workers: processes of this rank that make batches ahead; 0: the rank makes them itself. They are started by spawn, so they
            import the main program: it has to stand under `if __name__ == "__main__":`. An iterable dataset has one at most.
        slices: of the model (`fully_shard(slices=)`), a divisor of `batch`. Then each step gives a list of batches: this rank's slices,
            in the order of `mpitrain.rounds(model)`. A rank reads the rows of its own slices alone (of an iterable dataset it reads all
            samples). In a round that does not count, it gets the first slice again. 0: no slices.

    Raises:
        TypeError: a DataLoader without a state, or a dataset that is none of these.
        ValueError: fewer rows or slices than ranks, a dataset that is empty or has another length on another rank, settings of another
            kind of dataset, or a DataLoader that forks.
    """
    from torch.utils.data import DataLoader, default_collate

    comm, data = _groups(mesh)
    with comm.together():
        if isinstance(dataset, DataLoader):
            _check_loader(dataset, batch=batch, shuffle=shuffle, collate=collate, workers=workers, slices=slices)
            return LoaderBatches(dataset, comm, data)
        if batch is None or batch < data.size:
            raise ValueError(f"batches: expected batch, at least one sample for each of {data.size} ranks, got {batch}")
        if workers < 0:
            raise ValueError(f"batches: expected workers of at least 0, got {workers}")
        share, num_repeated = _share(batch, slices, data)
        rows = _rows(dataset, share, seed, shuffle, collate or default_collate)
        if isinstance(rows, IterableRows) and workers > 1:
            raise ValueError(
                f"batches: expected workers=0 or 1 for an iterable dataset, because each worker would read all samples; got {workers}"
            )
    lengths = comm.all_gather_object(rows.num_samples if isinstance(rows, MapRows) else None)
    with comm.together():
        if len({*lengths}) > 1:
            raise ValueError(f"batches: expected the same dataset on all ranks, got the lengths {lengths[:8]}")
    return DatasetBatches(rows, comm, data, workers=workers, num_repeated=num_repeated)


def _groups(mesh: Mesh | Communicator | None) -> tuple[Communicator, Communicator]:
    """All ranks, and those that share a global batch."""
    if isinstance(mesh, Mesh):
        return mesh.comm, mesh[tuple(name for name in mesh.axes if name in _DATA_AXES)]
    comm = mesh or collectives.world()
    return comm, comm


def _share(batch: int, slices: int, data: Communicator) -> tuple[Share, int]:
    """This rank's rows, and with slices the number of its rounds that repeat one."""
    if not slices:
        return Share(batch, ((batch * data.rank // data.size, batch * (data.rank + 1) // data.size),)), 0
    if slices < data.size or slices & (slices - 1) or batch % slices:
        raise ValueError(
            f"batches: slices: expected a power of two that divides batch={batch}, and at least one slice for each of {data.size} "
            f"ranks, got {slices}"
        )
    from mpitrain.sharding.slices import Slices

    its = Slices(slices, data.size, data.rank)
    parts = tuple(its.rows(number, batch) for number, counts in its.rounds if counts)
    return Share(batch, parts, is_sliced=True), its.num_rounds - len(parts)


def _rows(dataset: Any, share: Share, seed: int, shuffle: bool | None, collate: Collate) -> SampleRows:
    from torch.utils.data import IterableDataset

    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_iterable:
        if not hasattr(dataset, "__iter__"):
            raise TypeError(
                f"batches: expected a dataset with [index] and len, or an iterable one, got {type(dataset)}"
            )
        if shuffle:
            raise ValueError(
                "batches: shuffle: an iterable dataset has its own order; shuffle in it, or leave this out"
            )
        return IterableRows(dataset, share, seed=seed, collate=collate)
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"batches: expected a dataset with len, got {type(dataset)}, which has [index] alone")
    if not len(dataset):
        raise ValueError("batches: the dataset is empty; expected samples")
    return MapRows(dataset, share, seed=seed, collate=collate, is_shuffled=shuffle is not False)


def _check_loader(loader: "DataLoader[Any]", **settings: Any) -> None:
    check_start(loader)
    if not hasattr(loader, "state_dict"):
        raise TypeError(
            "batches: a DataLoader has no state that a checkpoint can keep; pass its dataset with batch=, collate= and workers=, or "
            "make it a torchdata.stateful_dataloader.StatefulDataLoader"
        )
    if given := [name for name, value in settings.items() if value]:
        raise ValueError(f"batches: {given[0]}: a StatefulDataLoader has its own setting; leave this one out")


def _count(state: Mapping[str, Any], name: str) -> int:
    """A number of a state. ValueError if it is none: a checkpoint of a stranger may have anything there."""
    if type(number := state.get(name)) is not int or not 0 <= number <= _MAX_COUNT:
        raise ValueError(f"batches: the state has {name} {number!r:.100}; expected a number from 0 to {_MAX_COUNT}")
    return number


def _packed(state: Any) -> str:
    """A state as text. TypeError if it has objects that only a pickle can keep: reading one runs code."""
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    text = base64.b64encode(file.getvalue()).decode()
    try:
        _unpacked(text)
    except Exception as error:
        raise TypeError(
            "batches: expected a StatefulDataLoader whose state has numbers, text, lists, dicts and tensors alone, got other objects: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return text


def _unpacked(text: Any) -> Any:
    """The state of `_packed`. ValueError for a text that is none, or whose state would be larger than it."""
    import torch

    if not isinstance(text, str):
        raise ValueError(f"batches: the state of a rank is a {type(text).__name__}; expected text")
    file = io.BytesIO(base64.b64decode(text))
    torch_archive.check(file)
    file.seek(0)
    return torch.load(file, weights_only=True)
