"""The endless sequence of chunks of a source: permuted epochs, of which each has every chunk once.

A chunk is a part of a shard, of `chunk_bytes` bytes: its documents are those that begin there. So the number of chunks follows from the
sizes of the shards, and no shard is opened before it is needed. In an epoch the shards come in another order. A window of neighbours in
this order, 16 shards, has its chunks in any order: so the rows of a batch come from many shards, and few shards are open at a time.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.job.data.order import keys_of, permute

WINDOW = 16
"""The shards of which the chunks are permuted together."""

_NUM_WINDOWS = 8
_NUM_LAYOUTS = 4  # of epochs: the lanes are in two neighbouring ones at a time, or in several of a small source


class Chunk(NamedTuple):
    """A chunk: the number of its shard, and its first byte. `epoch`: in which it comes."""

    epoch: int
    shard: int
    begin: int


class Era(NamedTuple):
    """From the epoch `first_epoch` on, the source has these shards. `num_chunks`: of each shard, int64."""

    first_epoch: int
    num_chunks: np.ndarray


def num_chunks(sizes: np.ndarray, splits: np.ndarray, chunk_bytes: int) -> np.ndarray:
    """The number of chunks of each shard. `splits`: whether a shard can be read in parts; else it is one chunk."""
    return np.where(splits, -(-sizes // chunk_bytes), 1).astype(np.int64)


class ChunkSequence:
    """The sequence of a source. `eras`: in order; the first one begins with epoch 0. `source`: the name, which chooses the order."""

    def __init__(self, eras: Sequence[Era], *, seed: int, source: str, chunk_bytes: int) -> None:
        self.seed, self._source, self.chunk_bytes = seed, source, chunk_bytes
        self._eras = list(eras)
        self._begins = [0]  # of each era, in the sequence
        for era, after in zip(self._eras, self._eras[1:], strict=False):
            length = int(era.num_chunks.sum()) * (after.first_epoch - era.first_epoch)
            self._begins.append(self._begins[-1] + length)
        self._windows: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._layouts: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()  # by epoch

    def __getitem__(self, number: int) -> Chunk:
        """The chunk number 0, 1, ... of the sequence."""
        index = int(np.searchsorted(self._begins, number, side="right")) - 1
        era = self._eras[index]
        epoch, at = divmod(number - self._begins[index], int(era.num_chunks.sum()))
        epoch += era.first_epoch
        order, window_ends = self._layout(epoch, era)
        window = int(np.searchsorted(window_ends, at, side="right"))
        begin = int(window_ends[window - 1]) if window else 0
        shards, parts = self._window(epoch, window, era.num_chunks, order)
        return Chunk(epoch, int(shards[at - begin]), int(parts[at - begin]) * self.chunk_bytes)

    def length(self, epoch: int) -> int:
        """The number of chunks of an epoch."""
        return int(next(era for era in reversed(self._eras) if era.first_epoch <= epoch).num_chunks.sum())

    def epoch_of(self, number: int) -> int:
        """The epoch of a chunk."""
        index = int(np.searchsorted(self._begins, number, side="right")) - 1
        era = self._eras[index]
        return era.first_epoch + (number - self._begins[index]) // int(era.num_chunks.sum())

    def _layout(self, epoch: int, era: Era) -> tuple[np.ndarray, np.ndarray]:
        """The order of the shards in an epoch, and the end of each window."""
        if epoch not in self._layouts:
            num = len(era.num_chunks)
            order = permute(np.arange(num), num, keys_of(self.seed, self._source, "shards", epoch))
            ends = np.cumsum(np.add.reduceat(era.num_chunks[order], np.arange(0, num, WINDOW)))
            self._layouts[epoch] = order, ends
            if len(self._layouts) > _NUM_LAYOUTS:
                self._layouts.popitem(last=False)
        return self._layouts[epoch]

    def _window(
        self, epoch: int, window: int, num_chunks: np.ndarray, order: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The shards of a window's chunks, and their places in the shards, permuted. `order`: of the epoch's shards."""
        if (epoch, window) not in self._windows:
            shards = order[window * WINDOW : (window + 1) * WINDOW]
            counts = num_chunks[shards]
            num = int(counts.sum())
            parts = np.arange(num) - np.repeat(np.cumsum(counts) - counts, counts)
            places = permute(np.arange(num), num, keys_of(self.seed, self._source, "window", epoch, window))
            self._windows[epoch, window] = np.repeat(shards, counts)[places], parts[places]
            if len(self._windows) > _NUM_WINDOWS:
                self._windows.popitem(last=False)
        return self._windows[epoch, window]
