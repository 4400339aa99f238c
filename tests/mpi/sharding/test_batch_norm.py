"""SyncBatchNorm against one process that has the whole batch."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from sharded_models import assert_same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mpitrain
from collectives import Communicator
from mpitrain.placement.batch_norm import SyncBatchNorm

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

ROWS = (3, 0, 2, 5)  # of the ranks: uneven, and one has none


def my_rows(comm: Communicator) -> tuple[slice, int]:
    """This rank's rows of the whole batch, and its length."""
    rows = ROWS[: comm.size]
    begin = sum(rows[: comm.rank])
    return slice(begin, begin + rows[comm.rank]), sum(rows)


def filled(layer: nn.Module) -> Any:
    for number, param in enumerate(layer.parameters()):
        with torch.no_grad():
            param.copy_(torch.rand(param.shape, generator=torch.Generator().manual_seed(number)))
    return layer


@pytest.mark.parametrize(
    ("shape", "mean", "tolerance", "settings"),
    [
        ((7, 5), 0.0, 1e-6, {}),
        ((5, 3, 7), 0.0, 1e-6, {"momentum": None}),
        # torch's kernel computes x * a + b, both terms near 1000, where numbers in float32 are 6e-5 apart.
        ((5, 3, 7), 1000.0, 2e-4, {}),
        ((3, 3, 2, 5), 0.0, 1e-6, {"affine": False}),
        ((3, 3, 2, 5), 0.0, 1e-6, {"track_running_stats": False}),
    ],
)
def test_it_is_batch_norm_of_the_whole_batch(
    comm: Communicator, shape: tuple[int, ...], mean: float, tolerance: float, settings: dict[str, Any]
) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)]
    plain = filled(kind(shape[0], **settings))
    layer = mpitrain.convert_sync_batchnorm(copy.deepcopy(plain), comm)
    mine, count = my_rows(comm)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        whole = (torch.randn(count, *shape, generator=generator) + mean).requires_grad_()
        part = whole.detach()[mine].clone().requires_grad_()
        grad = torch.randn(count, *shape, generator=generator)
        expected, out = plain(whole), layer(part)
        expected.backward(grad)
        out.backward(grad[mine])
        torch.testing.assert_close(out, expected[mine], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(part.grad, whole.grad[mine], rtol=tolerance, atol=tolerance)
    for buffer, of_plain in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, of_plain, rtol=tolerance, atol=tolerance)
    for param, of_plain in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            comm.all_reduce(param.grad.clone()), of_plain.grad, rtol=10 * tolerance, atol=10 * tolerance
        )
    x = torch.randn(4, *shape, generator=generator)
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"),
    # Numbers in float64 near 1e6 are 1e-10 apart, and torch's kernel computes x * a + b there.
    [(torch.float64, 0, 1e-12), (torch.float64, 1e6, 1e-8), (torch.bfloat16, 0, 0.05)],
)
def test_other_dtypes(comm: Communicator, dtype: torch.dtype, mean: float, tolerance: float) -> None:
    plain = filled(nn.BatchNorm1d(5).to(dtype))
    layer = mpitrain.convert_sync_batchnorm(copy.deepcopy(plain), comm)
    mine, count = my_rows(comm)
    whole = (torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype) + mean).requires_grad_()
    part = whole.detach()[mine].clone().requires_grad_()
    expected, out = plain(whole), layer(part)
    grad = torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected.backward(grad)
    out.backward(grad[mine])
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected[mine], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part.grad, whole.grad[mine], rtol=tolerance, atol=tolerance)


def composed(norm: nn.BatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    """BatchNorm by operations of torch, of which all derivatives are right; the third of torch's own layer is not."""
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    normalised = (x - mean) / (var + norm.eps).sqrt()
    return normalised if norm.weight is None else normalised * norm.weight.view(3, 1, 1) + norm.bias.view(3, 1, 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
@pytest.mark.parametrize("affine", [True, False])
def test_second_and_third_derivatives(comm: Communicator, dtype: torch.dtype, tolerance: float, affine: bool) -> None:
    """Of a penalty for the gradient of the input, as WGAN-GP has it. Rank 1 has no row."""
    plain = filled(nn.BatchNorm2d(3, affine=affine).to(dtype))
    layer = mpitrain.convert_sync_batchnorm(copy.deepcopy(plain), comm)
    mine, count = my_rows(comm)
    draw = torch.Generator().manual_seed(1)
    whole, weights = (torch.randn(count, 3, 2, 4, generator=draw).to(dtype) for _ in range(2))
    part = whole[mine].contiguous(memory_format=torch.channels_last).requires_grad_()
    whole.requires_grad_()
    found = []
    for norm, x, of in ((partial(composed, plain), whole, weights), (layer, part, weights[mine])):
        (first,) = torch.autograd.grad((norm(x).tanh() * of).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        second.square().sum().backward()
        found.append([first.detach(), second.detach(), x.grad])
    for expected, value in zip(*found, strict=True):
        assert value.dtype == dtype
        scale = float(expected.abs().max())
        torch.testing.assert_close(value, expected[mine], rtol=tolerance, atol=tolerance * scale)
    for param, of_plain in zip(layer.parameters(), plain.parameters(), strict=True):
        scale = float(of_plain.grad.abs().max())
        grad = comm.all_reduce(param.grad.clone())
        torch.testing.assert_close(grad, of_plain.grad, rtol=tolerance, atol=tolerance * scale)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 5, 3), nn.BatchNorm2d(5)
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu().mean((2, 3)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_evaluation_is_torchs_own(comm: Communicator, dtype: torch.dtype) -> None:
    """Also where the running statistics are in the dtype of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(5), nn.BatchNorm1d(5, track_running_stats=False), nn.BatchNorm1d(5, affine=False)
    ).to(dtype)
    x = torch.randn(6, 5, dtype=dtype)
    model.eval()
    expected = model(x)
    assert torch.equal(mpitrain.convert_sync_batchnorm(model, comm)(x), expected)


class KernelCalls(TorchDispatchMode):
    """Keeps the arguments of each call of the kernel of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            names = [argument.name for argument in func._schema.arguments]
            self.found.append(dict(zip(names, args, strict=False)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.ranks(2)
def test_the_kernel_of_the_backward_has_what_cuda_needs(comm: Communicator, dtype: torch.dtype, affine: bool) -> None:
    """The kernel for CUDA takes the statistics from `save_mean` and `save_invstd`, in the dtype in which it accumulates."""
    layer = mpitrain.convert_sync_batchnorm(nn.BatchNorm1d(4, eps=0.5, affine=affine).to(dtype), comm)
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    with KernelCalls() as calls:
        layer(whole[comm.rank :: 2].clone().requires_grad_()).square().sum().backward()
    (call,) = calls.found
    kind = torch.promote_types(dtype, torch.float32)
    assert {call[name].dtype for name in ("weight", "save_mean", "save_invstd", "running_mean", "running_var")} == {
        kind
    }
    expected = whole.to(kind).mean(0), (whole.to(kind).var(0, correction=0) + 0.5).rsqrt()
    near = 0.01 if dtype == torch.bfloat16 else 1e-5  # torch's kernel for CPUs rounds the mean of bfloat16 numbers
    for name, value in zip(("save_mean", "save_invstd"), expected, strict=True):
        torch.testing.assert_close(call[name], value, rtol=near, atol=near)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sharded_model_trains_as_one_process_does(comm: Communicator, stage: int) -> None:
    plain, model = net(), net()
    mpitrain.convert_sync_batchnorm(model, comm)
    mpitrain.fully_shard(model, comm, stage=stage)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    mine, count = my_rows(comm)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randn(count, 3, 8, 8, generator=generator), torch.randn(count, 4, generator=generator)
        (plain(x) - target).square().sum().div(count).backward()
        # The mean over ranks of these losses is the loss of the whole batch.
        (model(x[mine]) - target[mine]).square().sum().mul(comm.size / count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain, grads=False, rtol=1e-5, atol=1e-6)
    running = [each.running_var for each in model.modules() if isinstance(each, SyncBatchNorm)]
    for other in comm.all_gather_object(running):
        assert all(torch.equal(a, b) for a, b in zip(running, other, strict=True))  # the same bits on all ranks


def test_the_layers_that_are_replaced(comm: Communicator) -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.SyncBatchNorm(4)), nn.InstanceNorm1d(4), nn.LayerNorm(4))
    params, names = list(model.parameters()), list(model.state_dict())
    assert mpitrain.convert_sync_batchnorm(model, comm) is model
    assert model[0] is model[1][0]
    assert [type(each).__name__ for each in model.modules() if not isinstance(each, nn.Sequential)] == [
        "SyncBatchNorm", "SyncBatchNorm", "InstanceNorm1d", "LayerNorm",
    ]  # fmt: skip
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert list(model.state_dict()) == names
    assert isinstance(mpitrain.convert_sync_batchnorm(nn.BatchNorm2d(3), comm), SyncBatchNorm)


def test_wrong_use(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"):
        mpitrain.convert_sync_batchnorm(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="with a mesh pass"):
        mpitrain.convert_sync_batchnorm(nn.BatchNorm1d(3), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no shape yet"):
        mpitrain.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()), comm)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    mpitrain.fully_shard(model, comm)
    with pytest.raises(ValueError, match="1 is sharded already; call it before fully_shard"):
        mpitrain.convert_sync_batchnorm(model, comm)
    layer = mpitrain.convert_sync_batchnorm(nn.BatchNorm1d(3), comm)
    with pytest.raises(ValueError, match="expected more than 1 value per channel"):
        layer(torch.zeros(int(comm.rank == 0), 3))  # one value on rank 0 is all there is
    said = (
        r"expected an input of shape \(N, 3, \.\.\.\), got \(2, 4\)"
        if comm.rank == 0
        else "1 of . ranks got an input of another"
    )
    with pytest.raises(ValueError, match=said):
        layer(torch.zeros(2, 4 if comm.rank == 0 else 3))  # on rank 0 alone

    if comm.size > 1:
        layer = mpitrain.convert_sync_batchnorm(nn.BatchNorm1d(3 + comm.rank), comm)
        with pytest.raises(
            ValueError, match=r"SyncBatchNorm: the ranks differ: a layer of 3 channels, .*, a layer of 4"
        ):
            layer(torch.zeros(2, 3 + comm.rank))

    of_images = mpitrain.convert_sync_batchnorm(nn.BatchNorm2d(3), comm)
    with pytest.raises(ValueError, match=r"expected 4D input|ranks got an input of another"):
        of_images(torch.zeros(2, 3))  # as the layer before
    for mode in (of_images.train, of_images.eval):
        mode()
        of_images(torch.zeros(2, 3, 1, 1))

    class WithActivation(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    with pytest.raises(ValueError, match="is a WithActivation, which has a forward of its own"):
        mpitrain.convert_sync_batchnorm(WithActivation(3), comm)


@pytest.mark.ranks(2)
def test_fully_shard_refuses_torchs_own(comm: Communicator) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    with pytest.raises(
        ValueError, match=r"1 is a torch\.nn\.SyncBatchNorm.*call mpitrain\.convert_sync_batchnorm\(model\)"
    ):
        mpitrain.fully_shard(model, comm)
    mpitrain.fully_shard(mpitrain.convert_sync_batchnorm(model, comm), comm)
