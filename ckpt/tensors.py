"""The tensors that a caller passes: whole arrays, Shards, or lists of Shards. This module checks them for saving and loading."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ckpt.format.boxes import Box, Shape
from ckpt.format.manifest import axes_error, name_error, nesting_error, shape_error
from ckpt.views import stand_in
from collectives.arrays.buffer import as_numpy, is_jax
from collectives.arrays.dtypes import DTYPES, DTypeError, dtype_of


class Shard:
    """This rank's box of a tensor: `data`, a NumPy array or torch CPU tensor, at `offset` in a tensor of full `shape`.

    A rank with several boxes of one tensor passes a list of Shards; a rank without a box may pass an empty list. `data` has as many
    dimensions as the tensor. It may be empty (0 rows); for a scalar, any empty array means no box. `save` and `load` check the box.
    `axes`: for each dimension the name of the mesh axis along which it is cut, None for a whole dimension; only for people and tools.
    """

    __slots__ = ("axes", "data", "offset", "shape")

    def __init__(
        self, data: Any, shape: Sequence[int], offset: Sequence[int], axes: Sequence[str | None] | None = None
    ) -> None:
        self.data = data
        self.axes = None if axes is None else tuple(axes)
        self.shape: Shape = tuple(int(n) for n in shape)
        self.offset: Shape = tuple(int(n) for n in offset)

    def __repr__(self) -> str:
        return f"Shard(data of {tuple(self.data.shape)}, shape={self.shape}, offset={self.offset})"


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The properties of a tensor that must be the same on all ranks of a save. `whole`: each rank holds the whole tensor."""

    name: str
    dtype: str
    shape: Shape
    whole: bool
    axes: tuple[str | None, ...] | None = None

    def __str__(self) -> str:
        cut = "" if self.whole else " in shards"
        return f"{self.dtype} {self.shape}{cut}" + (f" along {self.axes}" if self.axes else "")


class LocalBox(msgspec.Struct, frozen=True):
    """An array in this rank's memory: the `box` of a tensor. `bring`: brings the loaded values from `array` to the caller's view."""

    box: Box
    array: np.ndarray
    bring: Callable[[], Any] | None = None

    def chunks(self, nbytes: int) -> Sequence[memoryview]:
        return chunks_of(self.array, nbytes)


def chunks_of(array: np.ndarray, nbytes: int) -> list[memoryview]:
    """The bytes of a contiguous array in chunks of `nbytes`; the last chunk may be shorter."""
    data = array.reshape(-1).view(np.uint8).data
    if 0 < len(data) <= nbytes:
        return [data]
    return [data[at : at + nbytes] for at in range(0, len(data), nbytes)]


class Local(msgspec.Struct, frozen=True):
    """This rank's part of one tensor: the boxes that are not empty. `description`: None for an empty list of Shards."""

    name: str
    description: Description | None
    boxes: tuple[LocalBox, ...]

    @property
    def whole(self) -> bool:
        """Whether each rank holds the whole tensor."""
        return self.description is not None and self.description.whole


def inspect(tensors: Mapping[str, Any], *, writable: bool = False) -> list[Local]:
    """The tensors, sorted by name, without a copy of any but views (views.py). TypeError or ValueError with the name of a tensor that
    cannot be used.

    `writable`: a load will fill the tensors.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"tensors is a {type(tensors).__name__}; expected a dict of name -> array, Shard or list of Shards"
        )
    for name in tensors:
        if problem := name_error(name):
            raise ValueError(problem)
    if problem := nesting_error(tensors):
        raise ValueError(problem)
    return [_local(name, tensors[name], writable) for name in sorted(tensors)]


def _local(name: str, value: Any, writable: bool) -> Local:
    if isinstance(value, Shard):
        return _of_one(name, value.data, value, writable)
    if not isinstance(value, (list, tuple)) or (value and not any(isinstance(shard, Shard) for shard in value)):
        return _of_one(name, value, None, writable)
    found = []
    for shard in value:
        if not isinstance(shard, Shard):
            raise TypeError(
                f"tensor {name!r} is a {type(value).__name__} of Shards with a {type(shard).__name__} in it; expected Shards alone"
            )
        found.append(_of_one(name, shard.data, shard, writable))
        if found[-1].description != found[0].description:
            raise ValueError(
                f"tensor {name!r}: a list with shards of {found[0].description} and of {found[-1].description}; "
                "expected shards of one tensor"
            )
    return Local(name, found[0].description if found else None, tuple(box for local in found for box in local.boxes))


def _of_one(name: str, data: Any, shard: Shard | None, writable: bool) -> Local:
    """One array: the whole tensor, or the box of `shard`."""
    # For a part of a tensor from another library, which would count as the whole tensor, this raises an error with advice.
    if shard is None and not writable and (refuse := getattr(data, "refuse_as_whole", None)) is not None:
        refuse()
    if writable and is_jax(data):
        raise TypeError(
            f"tensor {name!r} is a JAX array, which cannot be filled; ckpt.open(path).to_jax() makes new ones, also in parts"
        )
    try:
        data, bring = stand_in(data, f"tensor {name!r}", writable=writable)
        array = as_numpy(data, writable=writable, name=f"tensor {name!r}")
        dtype = dtype_of(array.dtype).name
    except DTypeError:
        kind = getattr(data, "dtype", type(data).__name__)
        raise DTypeError(
            f"tensor {name!r}: dtype {kind} is not supported; expected one of {', '.join(DTYPES)}, or a view as one of them, such as "
            "uint8"
        ) from None
    if shard is None:
        shape, axes, box = array.shape, None, Box.full(array.shape)
    else:
        shape, axes, box = shard.shape, shard.axes, Box(shard.offset, array.shape)
        if not (box.inside(shape) or (shape == () and not array.size)):
            raise ValueError(
                f"tensor {name!r}: a shard of shape {array.shape} at offset {shard.offset} does not lie inside the full shape {shape}"
            )
    if problem := shape_error(shape, array.itemsize):
        raise ValueError(f"tensor {name!r}: {problem}")
    if axes is not None and (problem := axes_error(axes, len(shape))):
        raise ValueError(f"tensor {name!r}: {problem}")
    boxes = (LocalBox(box, array, bring),) if array.size else ()
    return Local(name, Description(name, dtype, shape, shard is None, axes), boxes)
