"""The extra state of a model's modules: what `get_extra_state` returns beside parameters and buffers, and `set_extra_state` takes.

Its modules are those whose class has its own `get_extra_state`. It may be a tensor, or any other value.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from ckpt.ranks import ranks_of
from collectives import Communicator
from mpitrain.placement.parts import stages_of

_KEY = "_extra_state"
"""torch's name of it in a state dict, after the name of the module."""


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is the extra state of a module."""
    return name.rpartition(".")[2] == _KEY


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """This rank's modules that have extra state, by its name in a state dict."""
    return {
        f"{name}.{_KEY}".removeprefix("."): module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_states(
    model: nn.Module,
    comm: Communicator | None,
    doing: str,
    take: Callable[[Any, str], Any] | None = None,
    names: Container[str] | None = None,
) -> dict[str, Any]:
    """The extra states of all stages by name. Of several stages that have one the first counts.

    `comm`: the ranks of the model, or None. Collective; an error of a module is raised on all ranks. `take(state, name)`: what is made
    of each; None: tensors in host memory. `names`: of those to take; None: all.
    """
    with ranks_of(comm).together(doing):
        found = {
            name: (take or _in_host_memory)(module.get_extra_state(), name)
            for name, module in modules_with_extra_state(model).items()
            if names is None or name in names
        }
    stages = stages_of(model.parameters())
    if stages is not None and stages.size > 1:
        of_stages = stages.all_gather_object(found)
        found = {name: state for theirs in reversed(of_stages) for name, state in theirs.items()}
    return found


def _in_host_memory(value: Any, name: str) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
