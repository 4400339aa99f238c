"""The iteration of Newton and Schulz, which makes a matrix nearly orthogonal by products of matrices alone."""

import functools
from collections.abc import Sequence

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x x' x and x x' x x' x in one step (Jordan et al. 2024, kellerjordan.github.io/posts/muon): small singular values grow fast,
and all end between about 0.7 and 1.2."""

EPS = 1e-7  # the least norm by which a matrix is divided


def newton_schulz(
    matrix: torch.Tensor, steps: int, dtype: torch.dtype, coefficients: Sequence[float] = COEFFICIENTS
) -> torch.Tensor:
    """U V' of a matrix U S V' of 2 dimensions, roughly, with the same shape. Products and result are of `dtype`; `matrix` is kept.

    In bfloat16 the result has the bits of torch.optim.Muon for a contiguous matrix: the operations, their order and their memory
    layouts are the same.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype)
    x = x.T if is_tall else x  # the products below are of the shorter side
    x = x / x.norm().clamp(min=EPS)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def cost(rows: int, columns: int) -> int:
    """The multiplications and additions of one step for a matrix of this shape."""
    short, long = sorted((rows, columns))
    return 2 * short * short * (2 * long + short)


@functools.cache
def fast_dtype(device: str) -> torch.dtype:
    """The dtype of fast products on a kind of device, "cpu" or "cuda": bfloat16, or float32 on CPUs without units for bfloat16.

    Measured on one core, matrices of 576 x 192 to 2048 x 512: bfloat16 takes 0.25 to 0.3 of the time of float32 with these units, 1.3
    times as long with AVX-512 alone, and 14 to 40 times as long with AVX2.
    """
    if device != "cpu":
        return torch.bfloat16
    units = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if units.get("avx512_bf16") or units.get("amx_bf16") else torch.float32
