"""One tensor of a checkpoint: an index reads a part of it."""

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt.format.boxes import Box, Shape
from ckpt.format.manifest import CheckpointError, Manifest, Tensor
from ckpt.reading.indexing import Index, select
from ckpt.reading.reader import Reader
from ckpt.reading.sources import PIECE_BYTES
from ckpt.storage.places import Place
from collectives.arrays.dtypes import DTYPES


class TensorEntry:
    """One tensor of a checkpoint. Only `read`, an index (`entry[:10]`) or `numpy.asarray(entry)` read its values."""

    def __init__(self, folder: Place, manifest: Manifest, tensor: Tensor) -> None:
        self._folder = folder
        self._manifest = manifest
        self._tensor = tensor

    @property
    def name(self) -> str:
        return self._tensor.name

    @property
    def shape(self) -> Shape:
        return self._tensor.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of NumPy; `ml_dtypes.bfloat16` for bf16, `ml_dtypes.float8_e4m3fn` and others for float8."""
        return DTYPES[self._tensor.dtype].numpy

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements; 1 in zero dimensions."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    @property
    def blocks(self) -> list[tuple[str, Box]]:
        """The file and the box of each block."""
        return [(self._manifest.files[block.file].name, block.box) for block in self._tensor.blocks]

    @property
    def axes(self) -> tuple[str | None, ...] | None:
        """For each dimension the mesh axis along which it was cut, None if it is whole; None if no axes were saved (`Shard.axes`)."""
        return self._tensor.axes

    def read(self, where: Box | Index | tuple[Index, ...] | None = None, *, verify: bool = True) -> np.ndarray:
        """The whole tensor, a `Box` of it, or the part that integers, slices and one `...` select, as a new NumPy array.

        Only the blocks in this part are read; for a slice with a step everything between its ends, in pieces of 32 MiB. An integer
        drops its dimension, as in NumPy. `verify`: compare the chunks read with their checksums.

        IndexError for an index that does not fit. TypeError for NumPy's other indices (None, lists, masks): read, then index the
        array. CheckpointError for damage, or if the part does not fit into memory (a sparse file may claim any size).
        """
        selection = select(... if where is None else where, self.shape)
        out = self._empty(selection.counts)
        with Reader(self._folder, self._manifest, verify=verify) as reader:
            if selection.is_box:
                reader.fill(out, self._tensor, Box(selection.start, selection.counts))
            else:
                for part in selection.parts(PIECE_BYTES // self.dtype.itemsize):
                    box = selection.covering(part)
                    piece = np.empty(box.shape, self.dtype)
                    reader.fill(piece, self._tensor, box)
                    out[part.slices] = piece[selection.strides]
        return out.reshape(selection.shape)

    def chunks(self, *, verify: bool = True) -> Iterator[np.ndarray]:
        """Each element once, in the order of the files, as 1-D arrays of a few MiB. An array is valid until the next one is made.

        For functions that need little memory for a tensor of any size, and do not depend on the order of its elements.
        """
        with Reader(self._folder, self._manifest, verify=verify) as reader:
            yield from reader.elements(self._tensor)

    def _empty(self, shape: Shape) -> np.ndarray:
        nbytes = math.prod(shape) * self.dtype.itemsize
        try:
            if nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                return np.empty(shape, self.dtype)
        except MemoryError:
            pass
        raise CheckpointError(
            f"{self._folder}: {nbytes} bytes of tensor {self.name!r} do not fit into memory: read a part of it at a time"
        )

    def __getitem__(self, where: Box | Index | tuple[Index, ...]) -> np.ndarray:
        # `read` takes None as the whole tensor, but here it is an index.
        return self.read(where if isinstance(where, tuple) else (where,))

    def __len__(self) -> int:
        """The size of the first dimension. TypeError for a scalar, as in NumPy."""
        if not self.shape:
            raise TypeError(f"tensor {self.name!r} is a scalar, which has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return True  # also without elements, for `if entry := checkpoint.get(name)`

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"tensor {self.name!r} lies in a file: an array of it is always a copy")
        return self.read().astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return (
            f"TensorEntry({self.name!r}, {self._tensor.dtype}, shape={self.shape}, blocks={len(self._tensor.blocks)})"
        )
