"""Initial values of parameters: a function of only (seed, parameter name, element index).

So each rank can fill any box of rows of any parameter without communication, and the values are the same bits for every number
of ranks, sharded or not. A flattened parameter is cut into blocks of `BLOCK` elements. Each block has its own
counter-based generator (Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose
key is a hash of (seed, name, block). A rank draws the blocks that overlap its box, the last one only as far as needed.

The model chooses the distribution for each name: see `GPT.init_rule`. Values are the same on every machine of a job. NumPy
guarantees the stream of a bit generator, but not the algorithm of `standard_normal`, which a release may change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

BLOCK = 1 << 16
"""Elements per generator. Another number gives other values."""


class Init(Protocol):
    """The distribution of a parameter's initial values."""

    def draw(self, generator: np.random.Generator, out: np.ndarray) -> None:
        """Fill `out` (1-D float32) with the next values; a shorter `out` gets the first of the same values."""


@dataclass(frozen=True)
class Normal:
    """Normal values of mean 0."""

    std: float
    """Standard deviation."""

    def draw(self, generator: np.random.Generator, out: np.ndarray) -> None:
        """Fill `out` (1-D float32) in place."""
        generator.standard_normal(out=out, dtype=np.float32)
        out *= np.float32(self.std)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float
    """The value of all elements."""

    def draw(self, generator: np.random.Generator, out: np.ndarray) -> None:
        """Fill `out` (1-D float32) in place."""
        out.fill(self.value)


def fill_(
    tensor: torch.Tensor,
    init: Init,
    *,
    seed: int,
    name: str,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> None:
    """Fill a parameter, or a box of whole rows of it, with its initial values, in place.

    Values are drawn in float32 and cast to the tensor's dtype. Both parts of complex elements are drawn from `init`; a Constant is
    real.

    Args:
        tensor: the box: the whole parameter, or rows of the first dimension that is longer than 1. Any dtype, any device
            but meta; may be empty.
        init: the distribution.
        seed: the run's seed.
        name: the parameter's full name, the same on all ranks.
        shape: the full parameter's shape; default: the tensor is the whole parameter.
        offset: where the box begins in the full parameter; default: at its beginning.

    Raises:
        ValueError: a meta tensor, or a box that does not lie in the full shape or is not made of whole rows.
    """
    if tensor.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device and has no memory to fill; materialise it first")
    count = tensor.numel()
    if count == 0:
        return
    if tensor.is_complex() and not isinstance(init, Constant):
        parts = torch.view_as_real(tensor.detach())
        in_full = None if shape is None else (*shape, 2), None if offset is None else (*offset, 0)
        fill_(parts, init, seed=seed, name=name, shape=in_full[0], offset=in_full[1])
        return
    first = _first_element(tuple(tensor.shape), shape, offset, name)
    with torch.no_grad():
        flat = tensor.detach()
        flat = flat.view(-1) if flat.is_contiguous() else torch.empty(count, dtype=tensor.dtype, device=tensor.device)
        for block in range(first // BLOCK, (first + count - 1) // BLOCK + 1):
            start = block * BLOCK
            stop = min(start + BLOCK, first + count)
            values = np.empty(stop - start, np.float32)
            init.draw(_generator(seed, name, block), values)
            begin = max(start, first)
            flat[begin - first : stop - first].copy_(torch.from_numpy(values[begin - start :]))
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def fill_box_(
    tensor: torch.Tensor, init: Init, *, seed: int, name: str, shape: Sequence[int], offset: Sequence[int]
) -> None:
    """As `fill_`, for any box of a parameter: draws the rows that the box touches, some at a time, and keeps its part."""
    dim = next((d for d, length in enumerate(shape) if length > 1), 0)
    if tuple(tensor.shape[dim + 1 :]) == tuple(shape[dim + 1 :]):
        return fill_(tensor, init, seed=seed, name=name, shape=shape, offset=offset)
    within = tuple(
        slice(o, o + n) if d > dim else slice(None) for d, (o, n) in enumerate(zip(offset, tensor.shape, strict=True))
    )
    count = max(BLOCK // math.prod(shape[dim + 1 :]), 1)
    for start in range(0, tensor.shape[dim], count):
        some = tensor.narrow(dim, start, min(count, tensor.shape[dim] - start))
        rows = some.new_empty(tuple(n if d <= dim else shape[d] for d, n in enumerate(some.shape)))
        first = tuple(o + start if d == dim else o * (d < dim) for d, o in enumerate(offset))
        fill_(rows, init, seed=seed, name=name, shape=shape, offset=first)
        with torch.no_grad():
            some.copy_(rows[within])


def _first_element(box: tuple[int, ...], shape: Sequence[int] | None, offset: Sequence[int] | None, name: str) -> int:
    """Index of the box's first element in the flattened parameter; checks that the box is one run of elements."""
    full = box if shape is None else tuple(shape)
    begin = (0,) * len(full) if offset is None else tuple(offset)
    cut = next((d for d, length in enumerate(full) if length > 1), 0)
    whole = len(box) == len(begin) == len(full) and all(
        b == 0 and n == length for d, (b, n, length) in enumerate(zip(begin, box, full, strict=True)) if d != cut
    )
    if not whole or (full and not 0 <= begin[cut] <= begin[cut] + box[cut] <= full[cut]):
        raise ValueError(
            f"parameter {name!r}: expected a box of whole rows within the full shape {full}, "
            f"got shape {box} at offset {begin}"
        )
    return begin[cut] * math.prod(full[cut + 1 :]) if full else 0


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    text = f"{seed}/{block}/{name}".encode()
    key = hashlib.blake2b(text, digest_size=16, person=b"mpitrain.init").digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8").astype(np.uint64)))
