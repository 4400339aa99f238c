"""The rows of the global batches that belong to one rank. This module starts no MPI: worker processes run it, too.

The samples of a run are numbered without end, epoch after epoch, and the global batch of a step has the next `batch` samples. So it
depends on the seed and the step alone. The generators of random numbers are seeded for each sample: so augmentation does not depend on
the number of ranks or workers either.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any, NamedTuple

import numpy as np

from mpitrain.job.data.order import keys_of, permute
from mpitrain.job.data.samples.randomness import seed_generators

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


class SamplePlace(NamedTuple):
    """Where a batch begins: at this sample of this epoch, both counted from 0."""

    epoch: int
    sample: int


class Share(NamedTuple):
    """The part of each global batch of `batch` rows that belongs to one rank: the rows `begin` to `end - 1` of each (begin, end)."""

    batch: int
    parts: tuple[tuple[int, int], ...]
    is_sliced: bool = False
    """Whether the parts are slices, each of which is a batch of its own."""

    @property
    def rows(self) -> list[int]:
        """The numbers of all rows."""
        return [row for part in self.parts for row in range(*part)]


class SampleRows(ABC):
    """The batches of one rank, without end, from `place` on; with each batch the place of the one that follows it.

    An iterable dataset for torch's DataLoader, which takes no other class for one: see `workers.started`.

    Args:
        dataset: of the user.
        share: of the rank.
        seed: of the order, and of augmentation.
        collate: makes a batch of this rank's samples.
    """

    def __init__(self, dataset: Any, share: Share, *, seed: int, collate: Collate) -> None:
        self.dataset, self.share, self.seed, self._collate = dataset, share, seed, collate
        self.place = SamplePlace(0, 0)

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[SamplePlace, Any]]: ...

    def _made(self, samples: list[Any]) -> Any:
        """The batch of this rank's samples, in the order of the rows; or a list of the batches of its slices."""
        if not self.share.is_sliced:
            return self._collate(samples)
        left = iter(samples)
        return [self._collate(list(islice(left, end - begin))) for begin, end in self.share.parts]


class MapRows(SampleRows):
    """The rows of a map-style dataset. Worker w of W makes the batches w, w + W, ... `is_shuffled`: each epoch has another order."""

    def __init__(self, dataset: Any, share: Share, *, seed: int, collate: Collate, is_shuffled: bool) -> None:
        super().__init__(dataset, share, seed=seed, collate=collate)
        self.num_samples, self.is_shuffled = len(dataset), is_shuffled

    def __iter__(self) -> Iterator[tuple[SamplePlace, Any]]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batch, begin = self.share.batch, self.place.epoch * self.num_samples + self.place.sample
        for at in count(begin + first * batch, every * batch):
            yield SamplePlace(*divmod(at + batch, self.num_samples)), self._rows(at)

    def _rows(self, begin: int) -> Any:
        """This rank's rows of the global batch whose first sample is the number `begin` of the run."""
        epochs, places = np.divmod(begin + np.array(self.share.rows), self.num_samples)
        indices = places.copy()
        for epoch in np.unique(epochs) if self.is_shuffled else ():
            keys = keys_of(self.seed, "samples", epoch)
            indices[epochs == epoch] = permute(places[epochs == epoch], self.num_samples, keys)
        return self._made([self._sample(*each) for each in np.stack((epochs, places, indices), axis=1).tolist()])

    def _sample(self, epoch: int, place: int, index: int) -> Any:
        seed_generators(self.seed, "sample", epoch, place)
        return self.dataset[index]


class IterableRows(SampleRows):
    """The rows of an iterable dataset, of which this rank reads all samples, and keeps its own. One worker at most makes them."""

    def __iter__(self) -> Iterator[tuple[SamplePlace, Any]]:
        mine: list[Any] = []
        rows = set(self.share.rows)
        for row, (after, sample) in zip(cycle(range(self.share.batch)), self._samples(), strict=False):
            if row in rows:
                mine.append(sample)
            if row == self.share.batch - 1:
                yield after, self._made(mine)
                mine = []

    def _samples(self) -> Iterator[tuple[SamplePlace, Any]]:
        """All samples from `place` on, each with the place after it."""
        passed = self.place.sample
        for epoch in count(self.place.epoch):
            num = 0
            for num, sample in enumerate(self._epoch(epoch), start=1):
                if num > passed:
                    yield SamplePlace(epoch, num), sample
            if num < passed:
                raise ValueError(
                    f"batches: the dataset ended after {num} samples of epoch {epoch}, of which the saved run had taken {passed}; "
                    "expected the same samples in the same order"
                )
            if not num:
                raise ValueError(
                    f"batches: the dataset has no samples in epoch {epoch}; expected a dataset that can be iterated in each epoch, "
                    "which a generator cannot"
                )
            passed = 0

    def _epoch(self, epoch: int) -> Iterator[Any]:
        set_epoch((self.dataset,), epoch)
        seed_generators(self.seed, "epoch", epoch)
        samples = iter(self.dataset)
        for place in count():
            seed_generators(self.seed, "sample", epoch, place)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample


def set_epoch(objects: Sequence[Any], epoch: int) -> None:
    """Tell samplers and datasets that have a method `set_epoch`, as torch's DistributedSampler and Hugging Face's datasets do."""
    for each in objects:
        if callable(tell := getattr(each, "set_epoch", None)):
            tell(epoch)
