"""Errors for code that uses parameters of a sharded module outside the forward around which they are gathered.

If full parameters do not last, a module shows its shards outside that forward, and the code computes with this rank's rows. Mostly
torch then raises an error about shapes. If the shapes fit by chance (rows of an embedding), the result is wrong.
"""

from collections.abc import Sequence
from traceback import walk_tb
from typing import Any

from torch import nn

from mpitrain.sharding.step.arguments import tensors_in
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.registry import kind_of, unit_of
from mpitrain.sharding.unit.unit import Unit


def check_graph(output: Any, units: Sequence[Unit], root: nn.Module) -> None:
    """RuntimeError if the graph of `root`'s output has shards of these units. It takes about 1 us per node: for a first forward."""
    shards = {id(param.shard): param for unit in units for param in unit.params}
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        param = shards.get(id(getattr(node, "variable", None)))
        if param is not None:
            raise RuntimeError(_message(param, root))
        nodes += [before for before, _ in node.next_functions]


def check_error(error: Exception, units: Sequence[Unit], root: nn.Module) -> None:
    """RuntimeError in place of an error in a forward if the module of that forward shows shards of these units."""
    shards = {id(param.shard): param for unit in units for param in unit.params}
    forwards = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    for module in (frame.f_locals.get("self") for frame in reversed(forwards)):
        for shown in module._parameters.values() if isinstance(module, nn.Module) else ():
            if id(shown) in shards:
                raise RuntimeError(_message(shards[id(shown)], root)) from error


def _message(param: ShardedParameter, root: nn.Module) -> str:
    name, module = next(
        (name, part) for name, part in root.named_modules() if (unit := unit_of(part)) and param in unit.params
    )
    return (
        f"parameter {param.name} was used outside the forward of {name or 'the model'} (a {kind_of(module).__name__}), around "
        f"which it is gathered: there this rank has {tuple(param.shard.shape)} of {tuple(param.full.shape)}. Call that module as a "
        "whole; or shard the module that uses the parameter as one unit (fully_shard(..., units='one')), or shard the called part; or "
        "pass storage='resident'"
    )
