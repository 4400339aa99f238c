"""The extra state of a model's modules in a checkpoint: that of data rank 0.

It is in the meta as JSON (plain_values.py). A tensor too large for this, the Nth of a module, is `extra_state/N/NAME`, where NAME is
torch's name of the extra state in a state dict.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from mpitrain.weights.extra_state import extra_states, modules_with_extra_state
from mpitrain.weights.kinds.kind import There
from mpitrain.weights.meta.plain_values import decoded, encoded, is_small, small_tensor, torch_dtype


class SavedExtraState:
    """`comm`: the ranks of the model, or None. `names`: of the extra states, among others, that take part; None: all."""

    def __init__(self, model: nn.Module, comm: Communicator | None, names: Container[str] | None) -> None:
        self._model, self._comm = model, comm
        self._device = next((param.device for param in model.parameters()), torch.device("cpu"))
        modules = modules_with_extra_state(model)
        self._modules = {name: module for name, module in modules.items() if names is None or name in names}
        self._tensors: dict[str, torch.Tensor] = {}  # large ones, to be saved or filled

    def tensors(self) -> dict[str, Any]:
        return self._tensors

    def meta(self) -> dict[str, Any]:
        """Collective. TypeError on all ranks for a value that a checkpoint cannot keep."""
        found = extra_states(self._model, self._comm, "mpitrain.save", self._encoded, self._modules)
        return {"extra_state": found} if found else {}

    def _encoded(self, state: Any, name: str) -> Any:
        num = 0

        def keep(tensor: torch.Tensor) -> dict[str, Any]:
            nonlocal num
            if is_small(tensor):
                return encoded(tensor, name)
            path, num = f"extra_state/{num}/{name}", num + 1
            self._tensors[path] = tensor.detach()
            return {"type": "stored", "value": path, "device": tensor.device.type}

        return encoded(state, name, keep)

    def room(self, there: There) -> dict[str, Any]:
        """Older versions saved an extra state that is a tensor among the model's, which is passed over."""
        self._tensors = {
            path: torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
            for path, stored in there.tensors.items()
            if path.startswith("extra_state/") and path.partition("/")[2].partition("/")[2] in self._modules
        }
        return {**self._tensors, **{f"model/{name}": () for name in self._modules if f"model/{name}" in there.tensors}}

    def loaded(self, there: There) -> None:
        saved: Mapping[str, Any] = (there.part("extra_state") if self._modules else None) or {}
        for name, module in self._modules.items():
            if name in saved:
                module.set_extra_state(decoded(saved[name], self._tensor))

    def _tensor(self, value: dict[str, Any]) -> torch.Tensor:
        if value["type"] != "stored":
            return small_tensor(value, self._device)
        tensor = self._tensors.pop(value["value"])
        return tensor if value["device"] == "cpu" else tensor.to(self._device)
