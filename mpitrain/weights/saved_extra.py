"""The extra state of a model's modules in a checkpoint: what `get_extra_state` returns beside parameters and buffers.

It is in the meta as JSON (plain_values.py), the state of data rank 0. Its modules are those whose class has its own `get_extra_state`.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.ranks import Solo
from collectives import Communicator
from mpitrain.weights.plain_values import decoded, encoded, small_tensor
from mpitrain.weights.saved import There

_KEY = "_extra_state"
"""torch's name of it in a state dict, after the name of the module."""


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is the extra state of a module."""
    return name.rpartition(".")[2] == _KEY


class SavedExtraState:
    """`stages`: the ranks of the pipeline, or None. `names`: of the parameters and buffers whose modules take part; None: all."""

    def __init__(self, model: nn.Module, stages: Communicator | None, names: Container[str] | None) -> None:
        self._stages = stages if stages is not None and stages.size > 1 else None
        self._device = next((param.device for param in model.parameters()), torch.device("cpu"))
        self._modules = {
            f"{name}.{_KEY}".removeprefix("."): module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
            and (names is None or any(f"{name}.{own}".removeprefix(".") in names for own in _own_names(module)))
        }

    def tensors(self) -> dict[str, Any]:
        return {}

    def meta(self) -> dict[str, Any]:
        """Collective if the model is a pipeline. TypeError for a value that a checkpoint cannot keep."""
        with (Solo() if self._stages is None else self._stages).together("mpitrain.save"):
            found = {name: encoded(module.get_extra_state(), name) for name, module in self._modules.items()}
        if self._stages is not None:
            found = {name: its for theirs in self._stages.all_gather_object(found) for name, its in theirs.items()}
        return {"extra_state": found} if found else {}

    def room(self, there: There) -> dict[str, Any]:
        """Older versions saved an extra state that is a tensor among the model's, which is passed over."""
        return {f"model/{name}": () for name in self._modules if f"model/{name}" in there.tensors}

    def loaded(self, there: There) -> None:
        saved: Mapping[str, Any] = there.meta.get("extra_state", {})
        for name, module in self._modules.items():
            if name in saved:
                module.set_extra_state(decoded(saved[name], lambda each: small_tensor(each, self._device)))


def _own_names(module: nn.Module) -> list[str]:
    return [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
