"""How a stream of activations enters and leaves a region, forward and backward. Each way in is the backward of a way out.

| function | forward | backward |
| --- | --- | --- |
| `copy` | the stream as it is | all-reduce |
| `add` | all-reduce | the gradient as it is |
| `gather_tokens` | all-gather of tokens | reduce-scatter |
| `scatter_tokens` | reduce-scatter | all-gather of tokens |
| `own_tokens` | this rank's tokens | all-gather of tokens |
| `all_tokens` | all-gather of tokens | this rank's tokens |
| `gather_features` | all-gather of features | this rank's features, or a reduce-scatter of features |
| `own_features` | this rank's features | zeros for the other features |

The first two are f and g of Megatron-LM, the next two its g-bar of sequence parallelism. Shapes: (..., L, C) with L tokens and C
features. All ranks of a group call each function in the same order.

`row_product` and `column_product` are the products of a region's last and first matrix. They compute what the ranks will add up where
the other ranks can read it, and the exchange goes on while a rank computes the gradient of its weight. The stages of a pipeline may
leave this gradient for later. Then gathered tokens, an input or a gradient, are kept until then: so that half of the backward has no
exchange, and on a node the ranks keep one array together.
"""

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mpitrain.tensor.exchange import Exchange, own_part
from mpitrain.torch_glue.products import product, product_into, rows
from mpitrain.torch_glue.weight_gradients import Gradients, now_or_later, weight_gradient

Context = Any


class _Copy(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return ctx.exchange.whole_sum(ctx.exchange.room_with(grad)), None


class _Add(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        return exchange.whole_sum(exchange.room_with(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return grad, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, exchange: Exchange, length: int) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.gather(x, -2, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return ctx.exchange.own_sum(ctx.exchange.room_with(grad), -2), None, None


class _ScatterTokens(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.length = exchange, x.shape[-2]
        return exchange.own_sum(exchange.room_with(x), -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return ctx.exchange.gather(grad, -2, ctx.length).clone(), None


class _OwnTokens(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.length = exchange, x.shape[-2]
        return own_part(x, exchange.comm, -2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return ctx.exchange.gather(grad, -2, ctx.length).clone(), None


class _AllOf(Function):
    """All tokens or features of a stream of which each rank has its own.

    The gradient is the same on all ranks or, if `is_partial`, the sum of the ranks' gradients.
    """

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, exchange: Exchange, length: int, dim: int, is_partial: bool
    ) -> torch.Tensor:
        ctx.exchange, ctx.dim, ctx.is_partial = exchange, dim, is_partial
        return exchange.gather(x, dim, length).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        if ctx.is_partial:
            grad = exchange.own_sum(exchange.room_with(grad), ctx.dim)
        else:
            grad = own_part(grad, exchange.comm, ctx.dim)
        return grad, None, None, None, None


class _RowProduct(Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, exchange: Exchange, cuts_tokens: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.params, ctx.exchange, ctx.cuts_tokens = (weight,), exchange, cuts_tokens
        room = exchange.room((*x.shape[:-1], len(weight)), x)
        product_into(room.own, x, weight.t())
        return exchange.own_sum(room, -2) if cuts_tokens else exchange.whole_sum(room)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.cuts_tokens:
            grad = ctx.exchange.gather(grad, -2, x.shape[-2])
        needs_x, needs_weight, *_ = ctx.needs_input_grad

        def products() -> Gradients:
            return (weight_gradient(ctx.params[0], grad, x) if needs_weight else None,)

        grad_x = product(grad, weight) if needs_x else None
        return grad_x, *now_or_later(ctx.params, products), None, None


class _ColumnProduct(Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.params, ctx.exchange = (weight, bias), exchange
        return product(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad

        def products() -> Gradients:
            of_weight = weight_gradient(ctx.params[0], grad, x) if needs_weight else None
            return of_weight, rows(grad).sum(0) if needs_bias else None

        grad_x = None
        if needs_x and ctx.exchange is None:
            grad_x = product(grad, weight)
        elif needs_x:
            room = ctx.exchange.room(tuple(x.shape), x)
            product_into(room.own, grad, weight)
            ctx.exchange.post(room)
            grad_x = room.own
        return grad_x, *now_or_later(ctx.params, products), None


def copy(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """`x`, whose gradient is the sum of the ranks' gradients."""
    return _Copy.apply(x, exchange)


def add(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The sum of the ranks' `x`."""
    return _Add.apply(x, exchange)


def gather_tokens(x: torch.Tensor, exchange: Exchange, length: int) -> torch.Tensor:
    """All `length` tokens; the gradient of this rank's tokens is the sum of the ranks' gradients."""
    return _GatherTokens.apply(x, exchange, length)


def scatter_tokens(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """This rank's tokens of the sum of the ranks' `x`."""
    return _ScatterTokens.apply(x, exchange)


def own_tokens(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """This rank's tokens of `x`, which is the same on all ranks."""
    return _OwnTokens.apply(x, exchange)


def all_tokens(x: torch.Tensor, exchange: Exchange, length: int) -> torch.Tensor:
    """All `length` tokens, the same on all ranks."""
    return _AllOf.apply(x, exchange, length, -2, False)


def gather_features(x: torch.Tensor, exchange: Exchange, length: int, *, is_partial: bool = False) -> torch.Tensor:
    """All `length` features of the last dimension, the same on all ranks. `is_partial`: each rank computes a part of the gradient."""
    return _AllOf.apply(x, exchange, length, -1, is_partial)


def own_features(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """This rank's features of the last dimension of `x`, which is the same on all ranks. Each rank then has a part of the gradient."""
    return own_part(x, exchange.comm, -1)


def row_product(x: torch.Tensor, weight: torch.Tensor, exchange: Exchange, *, cuts_tokens: bool) -> torch.Tensor:
    """(..., L, C) -> (..., L, D): the sum of the ranks' `x @ weight.t()`. `cuts_tokens`: of this rank's tokens. `weight`: (D, C)."""
    return _RowProduct.apply(x, weight, exchange, cuts_tokens)


def column_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None
) -> torch.Tensor:
    """`F.linear(x, weight, bias)`. `exchange`: of an `x` from `copy` or `gather_tokens` that no other layer takes, otherwise None."""
    return _ColumnProduct.apply(x, weight, bias, exchange)
