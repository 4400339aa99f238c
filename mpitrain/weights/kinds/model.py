"""A model's parameters and buffers in a checkpoint, and the average of its weights."""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from mpitrain.sharding import EMA
from mpitrain.sharding.unit.unit import diloco_of
from mpitrain.weights.extra_state import is_extra_state
from mpitrain.weights.held import HeldTensors
from mpitrain.weights.kinds.kind import There


class SavedModel:
    """Parameters (tied ones under the first of their names), persistent buffers and averages. With local steps: outer parameters."""

    def __init__(self, model: nn.Module, ema: EMA | None, names: Container[str] | None) -> None:
        self._model, self._ema, self._names = model, ema, names
        self._narrow: dict[str, torch.Tensor] = {}  # averages of a load, in the 16 bits that older versions averaged in

    def tensors(self) -> dict[str, Any]:
        return self._held(is_saved=True)

    def meta(self) -> Mapping[str, Any]:
        return {}

    def room(self, there: There) -> dict[str, Any]:
        found, held = self._held(is_saved=False), HeldTensors(self._model, is_saved=False)
        params = dict(self._model.named_parameters(remove_duplicate=False))
        for name, average in ({} if self._ema is None else self._ema.tensors).items():
            stored = there.tensors.get(f"ema/{name}") if self._names is None or name in self._names else None
            if stored is not None and stored.dtype in ("bfloat16", "float16") and average.dtype == torch.float32:
                self._narrow[name] = torch.empty_like(average, dtype=getattr(torch, stored.dtype))
                found[f"ema/{name}"] = held(self._narrow[name], params[name])
        return found

    @torch.no_grad()
    def loaded(self, there: There) -> None:
        for name, narrow in self._narrow.items():
            assert self._ema is not None
            self._ema.tensors[name].copy_(narrow)
        self._narrow.clear()

    def _held(self, *, is_saved: bool) -> dict[str, Any]:
        held, diloco = HeldTensors(self._model, is_saved=is_saved), diloco_of(self._model)
        outer = {} if diloco is None else diloco.outer
        params = dict(self._model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        found: dict[str, Any] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            is_again = name in params and first.setdefault(id(params[name]), name) != name
            if is_again or is_extra_state(name):
                continue
            found[f"model/{name}"] = held(outer.get(name, value), params.get(name))
        for name, value in ({} if self._ema is None else self._ema.tensors).items():
            found[f"ema/{name}"] = held(value, params[name])
        return found
