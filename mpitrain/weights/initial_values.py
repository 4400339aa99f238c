"""`initialize`: initial values of a model's parameters, each rank those of its own rows. placement/fills.py draws them."""

from collections.abc import Callable

import torch
from torch import nn

from mpitrain.placement.fills import Init, fill_, fill_box_
from mpitrain.placement.marks import box_of, mark_cut, mark_replaced
from mpitrain.placement.parts import part_of
from mpitrain.sharding.buffers import with_memory


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
            fill_box_(
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
