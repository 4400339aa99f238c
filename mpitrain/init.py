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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from mpitrain.optim.spread import mark_cut, mark_replaced
from mpitrain.parts import part_of
from mpitrain.sharding.buffers import with_memory
from mpitrain.sharding.unit.marks import box_of

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


def initialize(model: nn.Module, rule: Callable[[str], Init] | None = None, *, seed: int = 0) -> None:
    """Give every parameter of a model its initial values, in place; each rank fills its own rows, without communication.

    Parameters on the meta device get memory on the CPU first; `fully_shard` has given it to the parameters that it shards. Running
    statistics (BatchNorm's) on the meta device get memory and their initial values, too; other buffers are left to the caller. Tied
    parameters are drawn once, under the first of their names. A shard has an attribute `shard_box` with the full parameter's
    `full_shape` and the shard's `offset` in it.

    Args:
        model: a module, plain, cut by `tensor_parallel`, or sharded.
        rule: the distribution for a parameter's name; default: the model's own `init_rule`.
        seed: the run's seed.

    Raises:
        TypeError: no rule given and the model has none.
        ValueError: the errors of `fill_`.
    """
    if rule is None:
        rule = getattr(model, "init_rule", None)
    if rule is None:
        raise TypeError(f"{type(model).__name__} has no init_rule(name); pass rule=, a function of a parameter's name")
    _give_memory(model)
    for name, parameter in model.named_parameters():
        box, part = box_of(parameter), part_of(parameter)
        if part is None or not part.full_shape:
            shape, offset = (None, None) if box is None else (box.full_shape, box.offset)
            fill_(parameter, rule(name), seed=seed, name=name, shape=shape, offset=offset)
            continue
        offset = (0,) * parameter.ndim if box is None else box.offset
        for place, piece in part.within(offset, parameter.shape):
            _fill_box(
                parameter.detach()[place], rule(name), seed=seed, name=name, shape=part.full_shape, offset=piece.offset
            )
    for path, module in model.named_modules():
        reset = getattr(module, "reset_running_stats", None)
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if reset is not None and names:
            for name in names:
                with_memory(model, f"{path}.{name}" if path else name)
            reset()


def _give_memory(model: nn.Module) -> None:
    """Replace parameters on the meta device by parameters on the CPU. Tied parameters stay tied, and parts keep their marks."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in made:
                made[id(param)] = new = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
                mark_replaced(param, f"{path}.{key}" if path else key, "initialize")
                if (part := part_of(param)) is not None:
                    mark_cut(new, f"{path}.{key}" if path else key, part)
            module._parameters[key] = made[id(param)]


def _fill_box(
    tensor: torch.Tensor, init: Init, *, seed: int, name: str, shape: Sequence[int], offset: Sequence[int]
) -> None:
    """As `fill_`, for any box of the parameter: draws the rows that the box touches, some at a time, and keeps its part of them."""
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
