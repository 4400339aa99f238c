"""The steps of optimizers that adapt the learning rate of each matrix by a trust ratio, made of the norms of weights and update."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mpitrain.optim.optimizer_checks import check_ranks
from mpitrain.optim.whole_norms import WholeNorms
from mpitrain.torch_glue.uncompiled import Uncompiled


class Adapted(NamedTuple):
    """A parameter with a gradient. The norms are those of the whole tensors; None: its group has no trust ratio."""

    param: torch.Tensor
    vector: torch.Tensor
    weight_norm: float | None
    vector_norm: float | None


class Layerwise(Uncompiled):
    """A base of optimizers with trust ratios. A step sends one message, with the norms of all parameters, also where ranks hold parts
    (see `WholeNorms` for stages of a pipeline).

    A group has a trust ratio if its weights decay, or if it has `always_adapt`. So the usual groups without decay, norms and biases,
    have none (You et al. 2019, and the usual implementations). All ranks have the same groups, and add groups together.
    """

    handles_shards = True  # optimizer_checks.py

    _checked: list[int] | None = None  # the ids of the parameters of `_norms`
    _norms: WholeNorms

    def _vectors(self, group: dict[str, Any]) -> dict[torch.Tensor, torch.Tensor]:
        """For each parameter of a group with a gradient, the tensor whose norm its trust ratio has."""
        raise NotImplementedError

    def _update(self, group: dict[str, Any], params: Sequence[Adapted]) -> None:
        """Update the parameters of a group that have a gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns the closure's value. Collective over the ranks that hold one copy of the model.

        ValueError on all ranks at the first step if they have other parameters or settings; see `check_ranks`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        if (ids := check_ranks(self, self._checked)) != self._checked:
            self._checked, self._norms = ids, WholeNorms(params)
        vectors: dict[torch.Tensor, torch.Tensor] = {}
        adapted: set[torch.Tensor] = set()
        for group in self.param_groups:
            found = self._vectors(group)
            vectors |= found
            adapted.update(found if group["weight_decay"] or group["always_adapt"] else ())
        norms = self._norms.of(
            [param if param in adapted else None for param in params],
            [vectors[param] if param in adapted else None for param in params],
        )
        of_param = dict(zip(params, zip(*norms, strict=True), strict=True))
        for group in self.param_groups:
            self._update(
                group,
                [
                    Adapted(param, vectors[param], *(of_param[param] if param in adapted else (None, None)))
                    for param in group["params"]
                    if param in vectors
                ],
            )
        return loss


def gradients(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of the parameters that have one, laid out in memory as they are. RuntimeError for a sparse one."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for param in params:
        if (grad := param.grad) is None:
            continue
        if grad.is_sparse:
            raise RuntimeError(f"{type(optimizer).__name__}: a gradient is sparse; expected dense gradients")
        found[param] = grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
    return found


def add_scaled(tensors: list[torch.Tensor], others: list[torch.Tensor], factors: Sequence[float]) -> None:
    """Add `factor * other` to each tensor, in place."""
    # On CPUs torch's foreach functions are such loops, and none has a factor for each tensor: two passes over memory, not one.
    if all(tensor.device.type == "cpu" for tensor in tensors):
        for tensor, other, factor in zip(tensors, others, factors, strict=True):
            tensor.add_(other, alpha=factor)
    elif tensors:
        torch._foreach_add_(tensors, torch._foreach_mul(others, factors))


def check_at_least_0(name: str, **settings: float) -> None:
    """ValueError for a setting of the optimizer `name` that is negative or not a number."""
    for setting, value in settings.items():
        if not value >= 0:
            raise ValueError(f"{name}: {setting} {value}; expected at least 0")
