"""The state to save: three ways to cut the same memory of a rank into tensors, so that all contestants move the same bytes."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ckpt.tensors import Shard

UNIT = 18_000  # elements per rank: the smallest number that all three ways divide into whole rows
NUM_TINY, NUM_LARGE = 2000, 8
_BLOCKS = 4
_WEIGHTS = {"attn.qkv": (3, 125), "attn.proj": (1, 125), "mlp.up": (4, 125), "mlp.down": (1, 500)}
_PARTS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


class Cut(NamedTuple):
    """A tensor of the smallest state: its name, the rows of each rank, and the columns."""

    name: str
    rows: int
    columns: int


def training() -> list[Cut]:
    """The state of ZeRO-3 training: parameters of transformer blocks and their two moments, each with some rows on each rank."""
    return [
        Cut(f"{part}/blocks.{block}.{name}.weight", rows, columns)
        for part in _PARTS
        for block in range(_BLOCKS)
        for name, (rows, columns) in _WEIGHTS.items()
    ]


def tiny() -> list[Cut]:
    """Many small tensors."""
    return [Cut(f"tiny/{i:04d}", 1, UNIT // NUM_TINY) for i in range(NUM_TINY)]


def large() -> list[Cut]:
    """Few large tensors."""
    return [Cut(f"large/{i}", 1, UNIT // NUM_LARGE) for i in range(NUM_LARGE)]


class Memory:
    """The memory of one rank, `flat` (float32, 1-D), as tensors. `scale`: the multiple of the smallest state."""

    def __init__(self, nbytes: int, rank: int, size: int) -> None:
        """`nbytes`: the most bytes of all `size` ranks together. ValueError if they are too few."""
        least = UNIT * 4 * size
        if nbytes < least:
            raise ValueError(f"--size is {nbytes} bytes; expected at least {least}, for {size} ranks")
        self.rank, self.size = rank, size
        self.scale = nbytes // least
        self.flat = np.zeros(self.scale * UNIT, np.float32)

    @property
    def nbytes(self) -> int:
        """The bytes of all ranks."""
        return self.flat.nbytes * self.size

    def fill(self) -> None:
        """Fill the memory with random numbers, different on each rank."""
        np.random.default_rng(self.rank).random(out=self.flat, dtype=np.float32)

    def arrays(self, cuts: list[Cut]) -> dict[str, np.ndarray]:
        """This rank's rows of each tensor, views of `flat`."""
        return dict(self._views(cuts))

    def shards(self, cuts: list[Cut]) -> dict[str, Shard]:
        """The same rows in the form of `ckpt.save` and `ckpt.load`."""
        return {
            name: Shard(array, (array.shape[0] * self.size, array.shape[1]), (array.shape[0] * self.rank, 0))
            for name, array in self._views(cuts)
        }

    def _views(self, cuts: list[Cut]) -> Iterator[tuple[str, np.ndarray]]:
        start = 0
        for name, rows, columns in cuts:
            stop = start + rows * self.scale * columns
            yield name, self.flat[start:stop].reshape(-1, columns)
            start = stop
        assert start == self.flat.size
