"""The tensors in the arguments and in the output of a module."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

T = TypeVar("T")


_DEEPEST = 3  # objects within objects


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors in the output of a module, also in dataclasses and other objects. 1 us for a tensor or a few of them in a tuple."""
    found: list[torch.Tensor] = []
    left, seen = [(output, 0)], set[int]()
    while left:
        value, depth = left.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) in _PLAIN or id(value) in seen or isinstance(value, nn.Module | type):
            continue
        elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            seen.add(id(value))
            left += [(each, depth) for each in (value.values() if isinstance(value, Mapping) else value)]
        elif depth < _DEEPEST:
            seen.add(id(value))
            left += [(each, depth + 1) for each in _attributes(value)]
    return found


def _attributes(value: object) -> Iterable[Any]:
    """The values of an object's own attributes."""
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if name[:2] != "__")
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}


def flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The leaves of arguments, and a function that restores the structure. torch's pytree takes 40 us; most arguments are flat."""
    names, count = list(kwargs), len(args)
    leaves = [*args, *kwargs.values()]
    if all(type(leaf) in _PLAIN for leaf in leaves):
        return leaves, lambda leaves: (tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True)))
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, lambda leaves: tree_unflatten(leaves, spec)


_ALIGNMENT = 64
"""Bytes. torch allocates at multiples of it."""


def aligned(values: T) -> T:
    """The same values, with copies of the floating-point tensors in host memory that begin within a vector of 64 bytes.

    MKL's products of matrices round differently at addresses that are no multiple of 16 (measured in float64, and in float32 products
    with a vector). A view of a slice begins at another address in a batch of other slices.
    """

    def copied(leaf: Any) -> Any:
        is_ours = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.is_floating_point()
        return leaf.clone() if is_ours and leaf.layout is torch.strided and leaf.data_ptr() % _ALIGNMENT else leaf

    copies: T = tree_map(copied, values)
    return copies


def cast(values: T, dtype: torch.dtype) -> T:
    """The same values with all floating-point tensors cast to `dtype`."""
    cast_all: T = tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, values
    )
    return cast_all
