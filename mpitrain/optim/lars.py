"""LARS (You, Gitman and Ginsburg 2017, arXiv:1708.03888), also for models whose parameters are spread over ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpitrain.optim.layerwise import Adapted, Layerwise, add_scaled, check_at_least_0, gradients


class LARS(Layerwise):
    """SGD with momentum, with the learning rate of each matrix multiplied by its trust ratio.

    The trust ratio of a parameter w with gradient g is trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), or 1 where |w| or
    |g| is 0. The step is b = momentum * b + ratio * (g + weight_decay * w), w -= lr * b: as in torch's SGD, the momentum has no lr. The
    numbers are those of one process.

    Args:
        params: parameters, or groups of them. A group may have every setting below.
        lr: the learning rate. With a trust coefficient of 0.001 values of 1 to 30 are usual.
        momentum: the share of the momentum that a step keeps; 0: none.
        weight_decay: of the weights. Parameters of a group without decay have no trust ratio: give norms and biases such a group.
        trust_coefficient: the factor of all trust ratios.
        eps: small number that is added to the divisor of the trust ratio.
        trust_clip: the learning rate of a matrix is its trust ratio, and at most lr, so that no step is larger than one of SGD (LARC).
        always_adapt: a group without decay has trust ratios too.

    Raises:
        ValueError: a setting outside its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        trust_clip: bool = False,
        always_adapt: bool = False,
    ) -> None:
        check_at_least_0("LARS", lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps)
        check_at_least_0("LARS", trust_coefficient=trust_coefficient)
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "eps": eps,
            "trust_clip": trust_clip, "always_adapt": always_adapt,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _vectors(self, group: dict[str, Any]) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients."""
        return gradients(self, group["params"])

    def _update(self, group: dict[str, Any], params: Sequence[Adapted]) -> None:
        if not params:
            return
        weights, grads = [each.param for each in params], [each.vector for each in params]
        for param in weights:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        ratios = [_ratio(group, each) for each in params]
        buffers = [self.state[param]["momentum_buffer"] for param in weights]
        torch._foreach_mul_(buffers, group["momentum"])
        add_scaled(buffers, grads, ratios)
        if decay := group["weight_decay"]:
            add_scaled(buffers, weights, [decay * ratio for ratio in ratios])
        torch._foreach_add_(weights, buffers, alpha=-float(group["lr"]))


def _ratio(group: dict[str, Any], of: Adapted) -> float:
    if not (of.weight_norm and of.vector_norm):
        return 1.0
    divisor = of.vector_norm + group["weight_decay"] * of.weight_norm + group["eps"]
    ratio, lr = float(group["trust_coefficient"] * of.weight_norm / divisor), float(group["lr"])
    return min(ratio / lr, 1.0) if group["trust_clip"] and lr else ratio
