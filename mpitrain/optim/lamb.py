"""LAMB (You et al. 2019, arXiv:1904.00962), also for models whose parameters are spread over ranks."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from mpitrain.optim.elementwise import adamw_in_whole_vectors
from mpitrain.optim.layerwise import Adapted, Layerwise, add_scaled, check_at_least_0, gradients


class LAMB(Layerwise):
    """AdamW, with the learning rate of each matrix multiplied by its trust ratio: the norm of the weights / the norm of the update.

    The update of a parameter w with the running means m and v (divided by 1 - beta^step) is u = m / (sqrt(v) + eps) + weight_decay * w,
    and the step is w -= lr * |w| / |u| * u. A trust ratio of which a norm is 0 is 1. The numbers are those of one process. The
    optimizer clips nothing: call `mpitrain.clip_grad_norm_` before the step. The step needs memory for one more copy of this rank's
    parts of the parameters.

    Args:
        params: parameters, or groups of them. A group may have every setting below.
        lr: the learning rate. 1e-3 to 2e-2 are usual.
        betas: decay factors of the running means of the gradients and of their squares.
        eps: small number that is added to the divisor.
        weight_decay: of the weights. Parameters of a group without decay have no trust ratio: give norms and biases such a group.
        bias_correction: divide the running means by 1 - beta^step, as Adam does.
        trust_clip: limit the trust ratio to 1.
        always_adapt: a group without decay has trust ratios too.

    Raises:
        ValueError: a setting outside its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        trust_clip: bool = False,
        always_adapt: bool = False,
    ) -> None:
        check_at_least_0("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB: betas {betas}; expected at least 0 and less than 1")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "trust_clip": trust_clip, "always_adapt": always_adapt,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _vectors(self, group: dict[str, Any]) -> dict[torch.Tensor, torch.Tensor]:
        """The updates, negative."""
        grads = gradients(self, group["params"])
        updates: dict[torch.Tensor, torch.Tensor] = {}
        alike: dict[tuple[torch.device, torch.dtype, float], list[torch.Tensor]] = {}
        for param in grads:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["step"] += 1
            alike.setdefault((param.device, param.dtype, state["step"].item()), []).append(param)
            updates[param] = param.mul(-group["weight_decay"]) if group["weight_decay"] else torch.zeros_like(param)
        for (device, _, step), params in alike.items():
            # torch's fused AdamW subtracts m / (sqrt(v) + eps), with lr 1, from what it takes for the parameters. It reads and writes
            # everything once, in a third of the time of a sequence of foreach functions. After infinite steps it corrects nothing.
            at = torch.full((), step if group["bias_correction"] else math.inf, dtype=torch.float32, device=device)
            update = partial(
                torch._fused_adamw_, lr=1.0, beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
                weight_decay=0.0, amsgrad=False, maximize=False,
            )  # fmt: skip
            means = [[self.state[param][name] for param in params] for name in ("exp_avg", "exp_avg_sq")]
            lists = [updates[param] for param in params], [grads[param] for param in params], *means
            adamw_in_whole_vectors(update, params, [_real(tensors) for tensors in lists], [at] * len(params))
        return updates

    def _update(self, group: dict[str, Any], params: Sequence[Adapted]) -> None:
        rates = []
        for _, _, weight, update in params:
            ratio = weight / update if weight and update else 1.0
            rates.append(float(group["lr"]) * (min(ratio, 1.0) if group["trust_clip"] else ratio))
        add_scaled([each.param for each in params], [each.vector for each in params], rates)


def _real(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers of complex tensors, of which Adam takes real and imaginary parts alike."""
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
