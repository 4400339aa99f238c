"""Optimizers without torch's compiler."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def plain(method: Callable[..., Any]) -> Any:
    """A method of torch without the wrapper that hides it from torch's compiler."""
    return getattr(method, "__wrapped__", method)


class Uncompiled(Optimizer):
    """A base of optimizers for programs that compile nothing: the same numbers, a faster start.

    The methods of torch's optimizers import its compiler (torch._dynamo), so that it does not compile them. This import takes as
    long as that of torch itself.
    """

    add_param_group = plain(Optimizer.add_param_group)
    zero_grad = plain(Optimizer.zero_grad)
