"""Errors for code that uses parameters of a sharded module outside the forward around which they are gathered.

There a module shows its shards, and the code computes with this rank's rows. Mostly torch then raises an error about shapes. If the
shapes fit by chance (rows of an embedding), the result is wrong. Four checks find such code, as far as it can be found:
- A guard (unit/parameter.py) sees the call of a module that shows shards.
- `refuse_gradient` sees a backward that reaches a shard.
- In private storage `check_graph` and `check_error` look at the root's forward, and name the module that is to be called.
- In private storage `AccessWatch` (watch.py) sees reads of freed memory, through a view that somebody has kept, and of shards. It
  watches the first forwards of the root.
Code without gradients outside of a forward that computes with a shard itself, without a call of its module, is not seen.
"""

from collections.abc import Sequence
from traceback import walk_tb
from typing import Any, NoReturn

from torch import nn

from mpitrain.placement.marks import box_of
from mpitrain.sharding.step.calls import tensors_in
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit, find, kind_of, root_of, unit_of


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
            raise RuntimeError(used_outside(param, root))
        nodes += [before for before, _ in node.next_functions]


def check_error(error: Exception, units: Sequence[Unit], root: nn.Module) -> None:
    """RuntimeError in place of an error in a forward if the module of that forward shows shards of these units."""
    shards = {id(param.shard): param for unit in units for param in unit.params}
    forwards = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    for module in (frame.f_locals.get("self") for frame in reversed(forwards)):
        for shown in module._parameters.values() if isinstance(module, nn.Module) else ():
            if id(shown) in shards:
                raise RuntimeError(used_outside(shards[id(shown)], root)) from error


def outside(module: nn.Module, *, is_in_forward: bool = False) -> RuntimeError:
    """The error for the call of a module that shows shards. `is_in_forward`: the root's forward runs, and not that of the unit."""
    shards = (
        find(id(shard)) for part in module.modules() for shard in part._parameters.values() if box_of(shard) is not None
    )
    param = next(param for param in shards if param is not None)
    root = root_of(module)
    if is_in_forward:
        return RuntimeError(used_outside(param, root))
    path = next((name for name, part in root.named_modules() if part is module), "") or "the model"
    return RuntimeError(
        f"{path} (a {kind_of(module).__name__}) was called while neither the forward of the {kind_of(root).__name__} around it nor a "
        f"registered method runs. There {_rows(param)}. {_REMEDY}"
    )


def refuse_gradient(param: ShardedParameter) -> NoReturn:
    """RuntimeError for a backward that has reached the shard of a parameter."""
    module = param.users[0][0]
    path = param.name.rpartition(".")[0] or "the model"
    raise RuntimeError(
        f"a backward reached a shard: parameter {param.name} of {path} (a {kind_of(module).__name__}) was used outside of the "
        "forward of the model and of its registered methods, or with private storage outside of that of its block. There "
        f"{_rows(param)}. {_REMEDY}"
    )


_REMEDY = (
    "Call the whole model; or let the method that does this gather parameters, by mpitrain.register_forward_method(model, 'name of the "
    "method') after fully_shard; or do it within `with mpitrain.unshard(model):`"
)


def _rows(param: ShardedParameter) -> str:
    return f"this rank has {tuple(param.shard.shape)} of {tuple(param.full.shape)} of parameter {param.name}"


def owner_of(param: ShardedParameter, root: nn.Module) -> tuple[str, nn.Module]:
    """The module, with its name in `root`, to whose unit a parameter belongs."""
    return next(
        (name or "the model", part)
        for name, part in root.named_modules()
        if (unit := unit_of(part)) and param in unit.params
    )


def used_outside(param: ShardedParameter, root: nn.Module) -> str:
    """The message for the use of a parameter whose unit's module is not running, in a forward of `root`."""
    name, module = owner_of(param, root)
    return (
        f"parameter {param.name} was used outside the forward of {name} (a {kind_of(module).__name__}), around "
        f"which it is gathered: there {_rows(param)}. Call that module as a whole, or a method of it after "
        "mpitrain.register_forward_method(module, 'name of the method'); or shard the module that uses the parameter as one unit "
        "(fully_shard(..., units='one')), or shard the called part; or pass storage='resident'; or call the model within `with "
        "mpitrain.unshard(model):`"
    )
