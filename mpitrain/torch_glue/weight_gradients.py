"""Backwards in two halves: the gradient of a stage's input first, and the gradients of the weights of its linear layers later.

A linear layer's backward has two products, one for each half. In a block `with waiting() as later:` a backward computes the first
product alone, and `later` collects the second one. Gradients of other parameters, such as norms, take little time and do not wait.

In a block `with added_in_place():` the second product is added to the gradient that a weight has already. autograd would write the
product to memory, and then read it again to add it, which takes a fifth of the product's time for few tokens. Megatron-LM calls this
the fusion of gradient accumulation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from mpitrain.torch_glue.products import product, rows
from mpitrain.torch_glue.torch_internals import backward

Gradients = tuple[torch.Tensor | None, ...]
"""A gradient of each parameter of a layer; None for one that needs none."""

Later = list[tuple[Sequence[torch.Tensor | None], Callable[[], Gradients]]]
"""What a backward has left for later: the parameters of each layer, and the products that give their gradients."""

_later: Later | None = None  # of the backward that runs now


@contextmanager
def waiting() -> Iterator[Later]:
    """Let the backwards in the block collect the products for the gradients of weights."""
    global _later  # the engine calls the backwards, which get no argument
    _later = []
    try:
        yield _later
    finally:
        _later = None


_adds_in_place = False  # the backward that runs now


@contextmanager
def added_in_place() -> Iterator[None]:
    """Let the backwards and `compute` in the block add to the gradients of weights. Hooks of these weights may not run."""
    global _adds_in_place
    _adds_in_place = True
    try:
        yield
    finally:
        _adds_in_place = False


def weight_gradient(
    weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, *, as_torch: bool = False
) -> torch.Tensor | None:
    """The gradient of `weight` (O, I) in `x @ weight.t()`, for `grad` (..., O) and `x` (..., I). None if it was added in place.

    `as_torch`: as for `product`.
    """
    into = weight.grad if _adds_in_place and weight.is_leaf else None
    # A hook of autograd, as for the sum over ranks of a model without `fully_shard`, changes a gradient before it is added.
    if into is None or weight._backward_hooks or into.dtype != grad.dtype or into.layout != torch.strided:
        return product(rows(grad).t(), rows(x), as_torch=as_torch)
    into.addmm_(rows(grad).t(), rows(x))
    return None


def now_or_later(params: Sequence[torch.Tensor | None], products: Callable[[], Gradients]) -> Gradients:
    """For the backward of a layer: the gradients of its parameters, or in a block of `waiting` None in place of each.

    `params`: the inputs of the layer's forward that are parameters, or views of them. `products` must communicate with no other rank,
    and keeps what it needs until `compute`.
    """
    if _later is None or not any(param is not None and param.requires_grad for param in params):
        return products()
    _later.append((params, products))
    return (None,) * len(params)


def compute(later: Later) -> None:
    """Compute what a backward has left for later, and accumulate it as a backward does, with the hooks of the parameters."""
    params: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for of_layer, products in later:
        for param, grad in zip(of_layer, products(), strict=True):
            if param is not None and grad is not None:
                params.append(param)
                grads.append(grad)
    later.clear()
    if params:
        backward(params, grads)
