"""SyncBatchNorm on a real GPU, whose kernels take other arguments than those for CPUs, beside torch's own layer on the host."""

import copy

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.float64, 1e-10), (torch.float16, 0.01), (torch.bfloat16, 0.08)],
)
def test_forward_and_backward(
    comm: Communicator, dtype: torch.dtype, tolerance: float, layout: torch.memory_format, affine: bool
) -> None:
    """`tolerance`: the dtypes' precision, of numbers up to 10."""
    device = torch.device("cuda", comm.node.rank % torch.cuda.device_count())
    generator = torch.Generator().manual_seed(0)
    whole, grad = (torch.randn(4 * comm.size, 5, 3, 7, generator=generator).to(dtype) for _ in range(2))
    mine = slice(4 * comm.rank, 4 * comm.rank + 4)
    plain = nn.BatchNorm2d(5, eps=0.1, affine=affine)
    layer = mpitrain.convert_sync_batchnorm(copy.deepcopy(plain), comm).to(device, dtype)
    expected_x = whole.double().clone().requires_grad_()
    expected = plain.double()(expected_x)
    expected.backward(grad.double())
    x = whole[mine].to(device, memory_format=layout).requires_grad_()
    out = layer(x)
    out.backward(grad[mine].to(device))
    pairs = [(out, expected[mine]), (x.grad, expected_x.grad[mine])]
    pairs += [(buffer, other) for buffer, other in zip(layer.buffers(), plain.buffers(), strict=True)]
    if comm.size == 1:
        pairs += [(param.grad, other.grad) for param, other in zip(layer.parameters(), plain.parameters(), strict=True)]
    for value, reference in pairs:
        torch.testing.assert_close(value.cpu().double(), reference.double(), rtol=tolerance, atol=tolerance)
