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
"""

from itertools import pairwise
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from collectives import Communicator

Context = Any


def bounds(length: int, size: int) -> list[int]:
    """Where each rank's tokens, or features, begin, and the end."""
    return [length * rank // size for rank in range(size + 1)]


def _gathered(x: torch.Tensor, comm: Communicator, length: int, dim: int = -2) -> torch.Tensor:
    """All ranks' parts of dimension `dim`, of `length` in all."""
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty(length, *first.shape[1:])
    edges, row = bounds(length, comm.size), first[:1].numel() if len(first) else out[:1].numel()
    comm.all_gather(out, first, counts=[(end - begin) * row for begin, end in pairwise(edges)])
    return out.movedim(0, dim).contiguous()


def _scattered(x: torch.Tensor, comm: Communicator, dim: int = -2) -> torch.Tensor:
    """This rank's part of dimension `dim` of the sum over the ranks."""
    first = x.movedim(dim, 0).contiguous()
    edges, row = bounds(len(first), comm.size), first[:1].numel()
    out = first.new_empty(edges[comm.rank + 1] - edges[comm.rank], *first.shape[1:])
    comm.reduce_scatter(out, first, counts=[(end - begin) * row for begin, end in pairwise(edges)])
    return out.movedim(0, dim)


def _own(x: torch.Tensor, comm: Communicator, dim: int = -2) -> torch.Tensor:
    edges = bounds(x.shape[dim], comm.size)
    return x.narrow(dim, edges[comm.rank], edges[comm.rank + 1] - edges[comm.rank])


class _Copy(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Add(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return grad, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, comm: Communicator, length: int) -> torch.Tensor:
        ctx.comm = comm
        return _gathered(x, comm, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return _scattered(grad, ctx.comm), None, None


class _ScatterTokens(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm, ctx.length = comm, x.shape[-2]
        return _scattered(x, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return _gathered(grad, ctx.comm, ctx.length), None


class _OwnTokens(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm, ctx.length = comm, x.shape[-2]
        return _own(x, comm).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        return _gathered(grad, ctx.comm, ctx.length), None


class _AllOf(Function):
    """All tokens or features of a stream of which each rank has its own.

    The gradient is the same on all ranks or, if `is_partial`, the sum of the ranks' gradients.
    """

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, comm: Communicator, length: int, dim: int, is_partial: bool
    ) -> torch.Tensor:
        ctx.comm, ctx.dim, ctx.is_partial = comm, dim, is_partial
        return _gathered(x, comm, length, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        own = _scattered(grad, ctx.comm, ctx.dim) if ctx.is_partial else _own(grad, ctx.comm, ctx.dim)
        return own, None, None, None, None


def copy(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """`x`, whose gradient is the sum of the ranks' gradients."""
    return _Copy.apply(x, comm)


def add(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum of the ranks' `x`."""
    return _Add.apply(x, comm)


def gather_tokens(x: torch.Tensor, comm: Communicator, length: int) -> torch.Tensor:
    """All `length` tokens; the gradient of this rank's tokens is the sum of the ranks' gradients."""
    return _GatherTokens.apply(x, comm, length)


def scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of the sum of the ranks' `x`."""
    return _ScatterTokens.apply(x, comm)


def own_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of `x`, which is the same on all ranks."""
    return _OwnTokens.apply(x, comm)


def all_tokens(x: torch.Tensor, comm: Communicator, length: int) -> torch.Tensor:
    """All `length` tokens, the same on all ranks."""
    return _AllOf.apply(x, comm, length, -2, False)


def gather_features(x: torch.Tensor, comm: Communicator, length: int, *, is_partial: bool = False) -> torch.Tensor:
    """All `length` features of the last dimension, the same on all ranks. `is_partial`: each rank computes a part of the gradient."""
    return _AllOf.apply(x, comm, length, -1, is_partial)


def own_features(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's features of the last dimension of `x`, which is the same on all ranks. Each rank then has a part of the gradient."""
    return _own(x, comm, -1)
