"""The inputs of the micro-batches of a step: arguments of the model, the same on all ranks of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mpitrain.placement.agreement import hash_of_values

Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""The arguments of one forward: a tensor, a sequence of them, or named ones."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""


class Described(NamedTuple):
    """What the ranks compare of a micro-batch."""

    shapes: tuple[Any, ...]
    """The shapes and dtypes of all tensors: the streams of equal ones have equal shapes."""
    values: tuple[str | None, ...]
    """For each a hash of its values; None if they are not in host memory."""


def call_of(given: Inputs) -> Call:
    """The arguments of one micro-batch. TypeError or ValueError for others than a pipeline can pass on."""
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if not isinstance(given, Sequence):
        raise TypeError(f"expected a tensor, a sequence or a mapping for each micro-batch, got {type(given).__name__}")
    if len(given) > 1:
        raise ValueError(
            f"expected one positional argument of a micro-batch, got {len(given)}; later stages get the named ones: pass a mapping"
        )
    return tuple(given), {}


def described(call: Call) -> Described:
    """What the ranks compare. ValueError for inputs without a tensor."""
    args, kwargs = call
    tensors = [
        (name, value) for name, value in (*enumerate(args), *sorted(kwargs.items())) if isinstance(value, torch.Tensor)
    ]
    if not tensors:
        raise ValueError("the inputs of a micro-batch contain no tensor")
    return Described(
        tuple((name, tuple(x.shape), str(x.dtype)) for name, x in tensors), tuple(hash_of_values(x) for _, x in tensors)
    )


def check_inputs(everyone: Sequence[Sequence[Described]]) -> None:
    """ValueError if the ranks have other micro-batches than rank 0."""
    for rank, theirs in enumerate(everyone):
        if len(theirs) != len(everyone[0]):
            raise ValueError(
                f"expected the same number of micro-batches on all ranks, got {[len(each) for each in everyone]}"
            )
        for micro, (first, other) in enumerate(zip(everyone[0], theirs, strict=True)):
            if first != other:
                what = f"{other.shapes} and {first.shapes}" if first.shapes != other.shapes else "other values"
                raise ValueError(
                    f"the inputs of micro-batch {micro} differ between ranks 0 and {rank} of the pipeline: {what}; the ranks of a "
                    "pipeline get the same inputs: seed and select the data by the data rank"
                )
