"""What must be the same on all ranks that shard a model."""

from torch import nn

from mpitrain.placement.marks import box_of
from mpitrain.sharding.setup.options import Options
from mpitrain.sharding.unit.registry import kind_of

REMEDY = "build the same model on all ranks and shard it with the same arguments in the same order"


def described(module: nn.Module, options: Options) -> list[str]:
    """One line for each argument, parameter and buffer that must be the same on all ranks."""
    lines = [f"a module {kind_of(module).__name__}", *options.described()]
    if not isinstance(options.units, str):
        units = {id(unit) for unit in options.units}
        lines += [f"a unit {name}" for name, part in module.named_modules() if id(part) in units]
    ignored = options.ignored
    names: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        tied = names.setdefault(id(param), name)
        if tied != name:
            lines.append(f"parameter {name}, tied to {tied}")
        elif box_of(param) is not None:
            lines.append(f"parameter {name}, sharded already")
        else:
            how = ", ignored" if id(param) in ignored else "" if param.requires_grad else ", frozen"
            dtype = str(param.dtype).removeprefix("torch.")
            lines.append(f"parameter {name} of shape {tuple(param.shape)}, {dtype}, on {param.device.type}{how}")
    for name, buffer in module.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        lines.append(f"buffer {name} of shape {tuple(buffer.shape)}, {dtype}, on {buffer.device.type}")
    return lines
