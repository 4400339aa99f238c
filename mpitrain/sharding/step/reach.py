"""Parameters that are used outside the forward around which they are gathered, by a parent that reaches into a sharded module.

Where full parameters do not last, a module shows its shards outside that forward, and computes with this rank's rows: mostly an error
of torch about shapes, but a wrong result where the shapes fit by chance (rows of an embedding).
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from mpitrain.sharding.setup.readiness import kind_of
from mpitrain.sharding.step.arguments import tensors_in
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit


def check_graph(output: Any, units: Sequence[Unit], root: nn.Module) -> None:
    """RuntimeError if the graph of what `root` returned has shards of these units. Some 1 us a node: for a first forward."""
    shards = {id(param.shard): param for unit in units for param in unit.params}
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        param = shards.get(id(getattr(node, "variable", None)))
        if param is not None:
            raise RuntimeError(_said(param, root))
        nodes += [before for before, _ in node.next_functions]


def check_error(error: Exception, units: Sequence[Unit], root: nn.Module) -> None:
    """RuntimeError in place of an error within a forward whose module shows shards of these units."""
    shards = {id(param.shard): param for unit in units for param in unit.params}
    for module in reversed(list(_run(error.__traceback__))):
        for shown in module._parameters.values():
            param = shards.get(id(shown))
            if param is not None:
                raise RuntimeError(_said(param, root)) from error


def _run(traceback: TracebackType | None) -> Iterator[nn.Module]:
    """The modules in whose forward an error came, from the outermost on."""
    while traceback is not None:
        code, module = traceback.tb_frame.f_code, traceback.tb_frame.f_locals.get("self")
        if code.co_name == "forward" and isinstance(module, nn.Module):
            yield module
        traceback = traceback.tb_next


def _said(param: ShardedParameter, root: nn.Module) -> str:
    name, module = next(
        (name, part) for name, part in root.named_modules() if "_unit" in vars(part) and param in part._unit.params
    )
    return (
        f"parameter {param.name} was used outside the forward of {name or 'the model'} (a {kind_of(module).__name__}), around "
        f"which it is gathered: there this rank has {tuple(param.shard.shape)} of {tuple(param.full.shape)}. Call that module as a "
        "whole; or shard the module that uses the parameter as one (fully_shard(..., units='one')), or the one that is called; or "
        "pass storage='resident'"
    )
