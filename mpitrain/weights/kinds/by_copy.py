"""The tensors of a checkpoint of local steps: what each copy of the model has of its own, and the outer optimizer's momentum.

`model/NAME` and `optimizer/KEY/NAME` are as in any checkpoint: the outer parameters, and the optimizer's state of copy 0. So a job
without local steps goes on from them. Three more kinds of tensors complete the state:

- `outer_momentum/NAME`: the momentum of the outer optimizer.
- `copies/model/NAME`, one row per copy: the inner parameters, if the last step was not an outer one.
- `copies/optimizer/KEY/NAME`, one row per copy but copy 0: the state of the inner optimizer.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

import ckpt
from mpitrain.sharding import DiLoCo
from mpitrain.weights.held import HeldByCopy, HeldTensors
from mpitrain.weights.kinds.kind import There


class SavedCopies:
    """What of local steps is saved and loaded, beside the outer parameters, and the optimizer's state of copy 0.

    `names`: of the parameters of `optimizer`, which may be None. `of_part`: of the model's parameters that take part; None: all. A copy
    beyond the number of those in a checkpoint takes the outer parameters, and the optimizer's state of the copy of its number modulo
    that.
    """

    def __init__(
        self,
        model: nn.Module,
        diloco: DiLoCo,
        optimizer: torch.optim.Optimizer | None,
        names: Mapping[nn.Parameter, str],
        of_part: Container[str] | None,
    ) -> None:
        self._model, self._diloco, self._names, self._of_part = model, diloco, names, of_part
        self._states: Mapping[Any, Mapping[str, Any]] = {} if optimizer is None else optimizer.state

    def meta(self) -> dict[str, Any]:
        return {"diloco": self._diloco.state_dict()}

    def tensors(self) -> dict[str, Any]:
        diloco, held = self._diloco, HeldTensors(self._model, is_saved=True)
        if not diloco.is_local:
            return {}
        params, num, copy = diloco.params, diloco.num_copies, diloco.copy
        found = {f"outer_momentum/{name}": held(value, params[name]) for name, value in diloco.momentum.items()}
        if diloco.is_apart:
            inner = HeldByCopy(self._model, is_saved=True, num_rows=num, row=copy)
            found |= {f"copies/model/{name}": inner(value, params[name]) for name, value in diloco.inner.items()}
        others = HeldByCopy(self._model, is_saved=True, num_rows=num - 1, row=copy - 1 if copy else None)
        for param, name in self._names.items() if num > 1 else ():
            for key, value in self._states.get(param, {}).items():
                if isinstance(value, torch.Tensor) and isinstance(held(value, param), ckpt.Shard | list):
                    found[f"copies/optimizer/{key}/{name}"] = others(value, param)
        return found

    def room(self, there: There) -> dict[str, Any]:
        held, params = HeldTensors(self._model, is_saved=False), self._diloco.params
        found: dict[str, Any] = {}
        for name, value in self._diloco.momentum.items():
            if f"outer_momentum/{name}" in there.tensors:
                found[f"outer_momentum/{name}"] = held(value, params[name])
        if self._has_inner(there):
            inner = HeldByCopy(self._model, is_saved=False, num_rows=self._num(there), row=self._diloco.copy)
            is_new = self._is_new(there)
            found |= {f"copies/model/{name}": () if is_new else inner(param, param) for name, param in params.items()}
        return found

    def room_of_state(self, path: str, value: torch.Tensor, param: nn.Parameter, there: There) -> dict[str, Any]:
        """What fills `value`, the optimizer's state `path` (KEY/NAME), in place of the state of copy 0. The same names on all ranks."""
        own, row = f"copies/optimizer/{path}", self._diloco.copy % self._num(there)
        if own not in there.tensors or not self._diloco.is_local:
            return {}
        if row == 0:
            return {own: ()}
        rows = HeldByCopy(self._model, is_saved=False, num_rows=self._num(there) - 1, row=row - 1)
        return {own: rows(value, param), f"optimizer/{path}": ()}

    def loaded(self, there: There) -> None:
        if self._diloco.is_local and self._is_new(there):
            self._diloco.show_outer(self._of_part)

    def _num(self, there: There) -> int:
        """The number of copies in the checkpoint."""
        return int((there.part("diloco") or {}).get("copies", 1))

    def _has_inner(self, there: There) -> bool:
        """Whether the checkpoint has inner parameters, and the steps go on as local ones."""
        return self._diloco.is_local and bool((there.part("diloco") or {}).get("is_apart", False))

    def _is_new(self, there: There) -> bool:
        """Whether the checkpoint has no inner parameters for this copy, which takes the outer ones."""
        return not self._has_inner(there) or self._diloco.copy >= self._num(there)
