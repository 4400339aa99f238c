"""Batch normalisation over the batches of all ranks, as if one process had the whole batch.

Each rank computes the mean and the variance of each channel over its own batch. One message in the forward merges them in float64,
where the sums of squares keep the variance of float32 inputs whose mean is large. Float64 inputs need a second message: it adds squares
of distances to the common mean (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, the two-pass algorithm).
One message in the backward adds the two sums of each channel that the gradient of the input needs. A backward with `create_graph=True`
sends two more, for the graph of the mean and the variance.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

import collectives
from collectives import Communicator
from mpitrain.placement.agreement import check_alike
from mpitrain.placement.marks import spread_of
from mpitrain.torch_glue.torch_internals import keep_compiler_out, not_compiled

_aten = torch.ops.aten
_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Of the layers that `convert_sync_batchnorm` replaces."""


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm layer whose statistics in training are those of the batches of all ranks of `comm`. Made by `convert_sync_batchnorm`.

    Input: (N, C, ...), with the same C and dtype on all ranks. N and the sizes behind C may differ between ranks; N may be 0. In
    training each forward and each backward is collective; in evaluation the layer is torch's own, which without running statistics
    takes those of this rank's batch. Second derivatives are those of the whole batch, too. ValueError on all ranks if they have
    at most one value of a channel together, or at the first forward another C or dtype; ValueError for a shape that the layer refused
    before it was converted.

    In a model with slices the statistics are those of one slice, and no message is sent: see sharding/slices/buffers.py.
    """

    def __init__(self, like: _BatchNorm, comm: Communicator) -> None:
        """`like`: the layer whose settings, parameters and buffers this layer takes over."""
        super().__init__(like.num_features, like.eps, like.momentum, affine=False, track_running_stats=False)
        self.affine, self.track_running_stats = like.affine, like.track_running_stats
        self._parameters, self._buffers = like._parameters, like._buffers
        self.training = like.training
        self._check_like = type(like)._check_input_dim
        self.comm: Communicator | None = comm
        """The ranks whose batches are one; None: this rank's batch, a slice, is one."""
        self._is_compared = False

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self._check_like(self, input)
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected an input of shape (N, {self.num_features}, ...), got {tuple(input.shape)}"
            )

    @not_compiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        keep_compiler_out()
        if not self.training or self.comm is None:
            return self._by_torch(input)
        if not self._is_compared:
            # Numbers of other lengths, or another number of messages, would end in an error of MPI.
            line = f"a layer of {self.num_features} channels, with an input of {input.dtype}"
            check_alike(self.comm, [line], caller="SyncBatchNorm", remedy="build the same model on all ranks")
            self._is_compared = True
        mean, var, count = self._statistics(input.detach(), self.comm)
        if self.running_mean is not None:
            self._update(mean, var * (count / (count - 1)))
        kind = _kind(input)
        out: torch.Tensor = _Normalise.apply(
            input, self.weight, self.bias, mean.to(kind), var.to(kind), count, self.eps, self.comm
        )
        return out

    def _by_torch(self, input: torch.Tensor) -> torch.Tensor:
        """torch's own layer. Its kernels want parameters in the dtype of the running statistics, which a policy does not cast."""
        if self.running_mean is None:
            return super().forward(input)
        params, kind = self._parameters, self.running_mean.dtype
        self._parameters = {name: None if each is None else each.to(kind) for name, each in params.items()}  # type: ignore[misc]
        try:
            return super().forward(input)
        finally:
            self._parameters = params

    @torch.no_grad()
    def _statistics(self, x: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The mean and the variance (1/n) of each channel over all ranks, (C,) float64 each, and the number of values n. Collective.

        ValueError on all ranks if one of them has an input of a wrong shape, or if all have fewer than two values per channel.
        """
        problem, count = None, 0
        try:
            self._check_input_dim(x)
            count = x.numel() // max(self.num_features, 1)
        except ValueError as error:  # the other ranks wait for this one's message
            problem = error
        own, summed = torch.zeros(2, 2, self.num_features, dtype=torch.float64, device=x.device)  # means, variances
        if count:
            own = torch.stack(_aten.batch_norm_update_stats(x, None, None, 0.0)).double()
            summed = count * torch.stack([own[0], own[1] + own[0].square()])
        numbers = torch.tensor([count, problem is not None], dtype=torch.float64, device=x.device)
        sums = torch.cat([summed.flatten(), numbers])
        comm.all_reduce(sums)
        total, num_problems = (int(number) for number in sums[-2:].tolist())
        if num_problems:
            raise problem or ValueError(
                f"SyncBatchNorm: {num_problems} of {comm.size} ranks got an input of another shape than "
                f"(N, {self.num_features}, ...)"
            )
        if total < 2:
            raise ValueError(
                f"SyncBatchNorm: expected more than 1 value per channel over {comm.size} ranks, got {total}"
            )
        mean, of_squares = sums[:-2].view(2, -1) / total
        if x.dtype != torch.float64:
            return mean, (of_squares - mean.square()).clamp_(min=0), total
        of_distances = count * (own[1] + (own[0] - mean).square())
        comm.all_reduce(of_distances)
        return mean, of_distances / total, total

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            running.lerp_(now.to(running), share)


def _kind(x: torch.Tensor) -> torch.dtype:
    """The dtype of the statistics: float32, of float64 inputs float64. torch's kernels take it for fp16 and bf16 inputs, too."""
    return torch.promote_types(x.dtype, torch.float32)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with the gradient through the mean and the variance over all ranks.

    mean, var: (C,), over the `count` values of a channel on all ranks of `comm`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        count: int,
        eps: float,
        comm: Communicator,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.count, ctx.eps, ctx.comm = count, eps, comm
        weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *_with_graph(x, weight, grad, ctx.count, ctx.eps, ctx.comm), None, None, None, None, None
        inverse = (var.double() + ctx.eps).rsqrt()  # of the standard deviation
        of_weight = of_bias = torch.zeros_like(mean)
        if x.numel():  # torch's kernel divides by zero for an empty input
            # With given statistics it returns both sums of a channel: of grad * normalised x, and of grad. The kernel for CPUs takes
            # the running statistics, the one for CUDA the saved ones.
            one, saved, wanted = torch.ones_like(mean), (mean, inverse.to(mean.dtype)), [False, True, True]
            _, of_weight, of_bias = _aten.native_batch_norm_backward(
                grad, x, one, mean, var, *saved, False, ctx.eps, wanted
            )
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_weight, of_bias]).double()
            ctx.comm.all_reduce(sums)
            scale = inverse if weight is None else inverse * weight.double()
            along_x, constant = (-scale * sums / ctx.count).to(mean.dtype)
            grad_x = F.batch_norm(x, mean, var, along_x, constant, training=False, eps=ctx.eps)
            grad_x.addcmul_(grad, scale.to(grad.dtype).view(1, -1, *[1] * (x.dim() - 2)))
        if weight is None:
            return grad_x, None, None, None, None, None, None, None
        return grad_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None, None, None


def _with_graph(
    x: torch.Tensor, weight: torch.Tensor | None, grad: torch.Tensor, count: int, eps: float, comm: Communicator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, weight and bias, as functions of all three arguments that autograd can derive. Collective.

    The mean and the variance depend on x; `_Normalise` has saved their values alone.
    """
    kind, dims, shape = _kind(x), [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    grad = grad.to(kind)
    from_mean = x.to(kind) - (_Sum.apply(x.to(kind).sum(dims), comm) / count).view(shape)
    var: torch.Tensor = _Sum.apply(from_mean.square().sum(dims), comm) / count
    inverse = (var + eps).rsqrt()
    normalised = from_mean * inverse.view(shape)
    own = torch.stack([(grad * normalised).sum(dims), grad.sum(dims)])
    along_x, constant = _Sum.apply(own, comm) / count
    scale = inverse if weight is None else inverse * weight.to(kind)
    grad_x = scale.view(shape) * (grad - constant.view(shape) - along_x.view(shape) * normalised)
    if weight is None:
        return grad_x.to(x.dtype), None, None
    of_weight, of_bias = own.to(weight.dtype)
    return grad_x.to(x.dtype), of_weight, of_bias


class _Sum(torch.autograd.Function):
    """The sum over the ranks of `comm`. Its gradient is the sum of the ranks' gradients. Collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Sum.apply(grad, ctx.comm), None


def convert_sync_batchnorm(module: nn.Module, comm: Communicator | None = None) -> nn.Module:
    """Let all BatchNorm layers of a model use the statistics of the batches of all ranks. Returns the model. Not collective.

    Call it before `fully_shard`. It replaces BatchNorm1d, 2d and 3d, and torch's own SyncBatchNorm, in the model; parameters and
    buffers stay the same objects. If `module` is such a layer itself, the new layer is returned.

    Args:
        module: a model, or a BatchNorm layer.
        comm: the ranks that share a batch; None: `collectives.world()`. With a mesh pass its data-parallel ranks,
            `mesh["dp_replicate", "dp_shard", "cp"]`.

    Raises:
        TypeError: `module` is no module, `comm` no communicator.
        ValueError: a layer is sharded already, or lazy and without a shape, or of a derived class with a forward of its own.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_sync_batchnorm: expected a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(comm, Communicator | None):
        raise TypeError(
            f"convert_sync_batchnorm: expected a collectives.Communicator or None, got {type(comm).__name__}; with a mesh pass "
            'mesh["dp_replicate", "dp_shard", "cp"]'
        )
    layers = {name: part for name, part in module.named_modules() if _is_converted(part)}
    for name, layer in layers.items():
        if type(layer).forward not in _FORWARDS:
            raise ValueError(
                f"convert_sync_batchnorm: {name or 'the module'} is a {type(layer).__name__}, which has a forward of its own that "
                "would be lost; put a BatchNorm layer and the rest of that forward in its place"
            )
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            if is_lazy(tensor):
                raise ValueError(f"convert_sync_batchnorm: {name} has no shape yet; run the model once before")
            if spread_of(tensor) is not None:
                raise ValueError(f"convert_sync_batchnorm: {name} is sharded already; call it before fully_shard")
    comm = comm or collectives.world()
    # A layer that two modules share stays shared.
    made = {id(layer): SyncBatchNorm(layer, comm) for layer in layers.values()}
    for part in list(module.modules()):
        for child, layer in part._modules.items():
            if id(layer) in made:
                part._modules[child] = made[id(layer)]
    return made.get(id(module), module)


def _is_converted(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and not isinstance(part, SyncBatchNorm)
