"""What must hold at each forward of a cut model: the ranks have the same inputs, and the parameters are the parts that were made.

With inputs of other shapes the ranks would wait for each other, and with other values each would add its part of another sum.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mpitrain.placement.agreement import check_alike, hash_of_values
from mpitrain.placement.parts import part_of
from mpitrain.placement.stage_streams import stream_of_stages
from mpitrain.tensor.exchange import Exchange


def check_inputs(exchange: Exchange, module: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook of a cut model. ValueError on all ranks if their inputs differ. Collective.

    The output of an earlier stage of a pipeline is not compared: its inputs were, and each rank may have its own tokens of it. The time
    counts as one of `exchange`: in a step this is the first wait of the ranks for each other.
    """
    began = time.perf_counter()
    stream = stream_of_stages(module)
    named = ((name, value) for name, value in kwargs.items() if name != stream)
    inputs = [*((f"input {at}", value) for at, value in enumerate(args)), *named]
    check_alike(
        exchange.comm,
        [_described(name, x) for input_name, value in inputs for name, x in _tensors(input_name, value)],
        caller=f"{type(module).__name__} is cut over {exchange.comm.size} ranks, which must get the same inputs",
        remedy="choose the batch and the seed by the data rank, mesh['dp_replicate', 'dp_shard', 'cp'].rank",
    )
    exchange.seconds += time.perf_counter() - began


class CheckParts:
    """A forward pre-hook of a cut model. RuntimeError if another parameter is in the place of a part, as after torch's `to_empty`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)  # not modules: `pipeline` frees those of other stages

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, param in module.named_parameters():
            if part_of(param) is None and name in self._names:
                raise RuntimeError(
                    f"{name} was replaced after tensor_parallel, so it is no longer this rank's part; to give memory to parameters on "
                    "the meta device call fully_shard or mpitrain.initialize, not to_empty"
                )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _tensors(f"{name}[{at}]", item)


def _described(name: str, x: torch.Tensor) -> str:
    said = f"{name} of shape {tuple(x.shape)}, {x.dtype}"
    values = hash_of_values(x)
    return said if values is None else f"{said}, values with the hash {values}"
