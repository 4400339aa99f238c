"""The modules of a sharded model as they were at its first forward. Parameters that are added later belong to no unit."""

from torch import nn

from mpitrain.placement.marks import box_of, is_ignored
from mpitrain.sharding.unit.parameter import functional_call
from mpitrain.torch_glue.torch_internals import in_functional_call


def check_added(module: nn.Module) -> None:
    """RuntimeError if a parameter of a sharded model is neither sharded nor ignored."""
    for name, param in module.named_parameters():
        if box_of(param) is None and not is_ignored(param):
            if in_functional_call():
                raise RuntimeError(functional_call(name))
            raise RuntimeError(
                f"parameter {name} was added or replaced after fully_shard: no rank would shard it or reduce its gradient; "
                "change the model before fully_shard, or keep the parameter out of the model"
            )


class Tree:
    """The parts of a module. `check()` runs before each forward and must be fast: 20 us for a hundred modules."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.take()

    def take(self) -> None:
        """Record the current parts. RuntimeError if one of their parameters is neither sharded nor ignored."""
        check_added(self.module)
        modules = list(self.module.modules())
        self._children = [(part._modules, tuple(part._modules.values())) for part in modules]
        self._counts = [(part._parameters, len(part._parameters)) for part in modules]
        self._absent = [
            (part._parameters, name) for part in modules for name, p in part._parameters.items() if p is None
        ]

    def check(self) -> None:
        """RuntimeError if parameters were added. Parts without parameters may be added, and any part may be removed."""
        if (
            any(tuple(now.values()) != before for now, before in self._children)
            or any(len(now) != before for now, before in self._counts)
            or any(now.get(name) is not None for now, name in self._absent)
        ):
            self.take()
