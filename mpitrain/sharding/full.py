"""Full parameters outside of forward and backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from mpitrain.sharding.module import ShardedModule, sharded_modules, step_of
from mpitrain.sharding.step.state import Phase
from mpitrain.sharding.unit.unit import UnitState, around_of
from mpitrain.sharding.writing import ShownParameters, check_problems, check_unwritten, copies_to_write


@contextmanager
def unshard(model: nn.Module, *, write: bool = False) -> Iterator[nn.Module]:
    """Within `with unshard(model):` the parameters are the full ones: to export, tie, count or generate; with `write=True` to change.

    `model`: a model, or a part of a model. Collective: all ranks enter and leave the block together. No effect on a model without
    sharded parts.

    Without `write` the parameters are those that forward and backward use, and are to be read. Forwards in the block keep them, so a
    loop that generates text gathers once; a backward in the block reduces its gradients as any other. With `param_dtype`, or
    `wire_weights` below fp32, they have rounded values; `mpitrain.full_state_dict` has those of the masters.

    `write`: the parameters are copies with the values and the dtype of the masters, and each rank holds the whole model. All ranks make
    the same writes; at the end each rank writes its own rows of its copies back, as FSDP1's `summon_full_params` does. Forwards in the
    block use the copies; a backward is an error.

    Raises:
        RuntimeError: in a forward, a backward or another such block. On all ranks at the end of the block: without `write` parameters
            were written, which the storage makes visible to some ranks or to none (writes through `param.data` are not seen); with
            `write` only some ranks have written to a parameter, or ranks have written different values; parameters were replaced, or
            shards were written.
    """
    parts = sharded_modules(model)
    around = around_of(model)
    if around is not None and not isinstance(model, ShardedModule):  # it uses parameters of the unit of that module
        parts = [around, *parts]  # type: ignore[list-item]
    for step in {part._step for part in parts if part._step is not None}:
        step.before_reads()
        if step.is_held:
            raise RuntimeError(
                "unshard: the model is inside another `with mpitrain.unshard(model)` block, which shows full parameters already; to "
                "write, leave that block before `with mpitrain.unshard(model, write=True)`"
            )
        if step.phase is not Phase.IDLE:
            raise RuntimeError("unshard: the model is in the middle of a step, where its parameters are full already")
    if any(part._unit.state is UnitState.COPIED for part in parts):
        raise RuntimeError("unshard: the model is within `unshard(model, write=True)` already")
    with copies_to_write(parts) if write else _for_reading(parts):
        yield model


@contextmanager
def _for_reading(parts: Sequence[ShardedModule]) -> Iterator[None]:
    steps = list(dict.fromkeys(step_of(part) for part in parts))
    for step in steps:
        step.begin_pass()
    for part in parts:
        step_of(part).begin_hold(part._unit)
    params = [param for part in parts for param in part._unit.params]
    shown = ShownParameters(parts, {param: param.full for param in params})
    problem: str | None = None
    try:
        yield
        problem = shown.problem()
    finally:
        ended = shown.end(problem)
        for param in params:
            param.shard.requires_grad_(param.full.requires_grad)  # the block may have frozen or thawed the parameter
        for part in parts:
            step_of(part).end_hold(part._unit)
        for step in steps:
            step.end_pass()
    for end in ended:
        check_problems(end)
        check_unwritten(end)
