"""The products of matrices that are cut, or in the stages of a pipeline, on CPUs by the faster of the two libraries in torch.

torch computes fp32 products on x86 by MKL. On AMD's processors oneDNN, which torch contains as well, is faster for large products: 103
instead of 90 GFLOP/s on a core of an EPYC (Zen 4). torch itself takes oneDNN for such products on Arm and in compiled
models. The choice depends on the processor and the sizes alone, so a run computes the same numbers each time.
"""

from functools import cache
from math import prod
from pathlib import Path

import torch

_LARGE = 1 << 24
"""Multiplications of a product that is large enough. A call of oneDNN takes 15 microseconds more than one of MKL."""


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, as_torch: bool = False
) -> torch.Tensor:
    """(..., m, k) @ (k, n), plus `bias` (n,) if there is one -> (..., m, n). For code without autograd.

    The result is not a view, so the code after an autograd Function may change it in place. `as_torch`: always by torch's choice.
    """
    if not as_torch and _takes_onednn(a, b):
        out = torch.ops.mkldnn._linear_pointwise(rows(a), b.t(), bias, "none", [], "")
    else:
        out = torch.mm(rows(a), b) if bias is None else torch.addmm(bias, rows(a), b)
    return torch.ops.aten._unsafe_view(out, (*a.shape[:-1], b.shape[1]))


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """(..., m, k) @ (k, n) into `out`, which is contiguous, of shape (..., m, n)."""
    if _takes_onednn(a, b):
        out.copy_(product(a, b))
    else:
        torch.mm(rows(a), b, out=rows(out))


def rows(x: torch.Tensor) -> torch.Tensor:
    """(..., C) as (rows, C)."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])  # -1 fails if there are no features


def _takes_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        type(a) is torch.Tensor
        and a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and a.numel() * b.shape[1] >= _LARGE
        and _is_faster()
    )


@cache
def _is_faster() -> bool:
    """Whether oneDNN is there, and the processor is AMD's."""
    try:
        return has_onednn() and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def has_onednn() -> bool:
    """Whether this torch can compute a product by oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
