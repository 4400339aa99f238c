"""Sums of powers of elements, with bits that do not depend on which ranks hold the elements.

A rank holds whole rows of a parameter (mpitrain/sharding/unit/layout.py). Each row, or each block of a long row, is summed in an order
that its length alone determines. The sum of all blocks is exact and is rounded once, so the order of blocks and of ranks does not
matter. The exact sum is one long number in fixed point (a superaccumulator: Neal 2015, arXiv:1505.05571).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

_BLOCK = 1024
"""The most elements of a row that are summed in the precision of the tensor, at least float32. Sums of blocks are added exactly."""

_PIECE, _PIECE_ELSEWHERE = 1 << 16, 1 << 22
"""Elements that are computed with at once: on CPUs, whose cache they fit, and elsewhere."""

_BITS = 32
_NUM_DIGITS = 64
_LOWEST = -992
"""A sum is a number of 64 digits of 32 bits. Digit 0 counts units of 2 ** -992; what is smaller is dropped."""

_CHUNK = 1 << 14
"""Values that are added at once. They fit the cache, and their multiples of a unit add up to less than 2 ** 53."""

SLOTS = _NUM_DIGITS + 1
"""The length of a sum in a message: its digits, then 0, infinity or NaN. The messages of up to 2 ** 21 ranks may be added."""


def block_sums(tensors: Sequence[torch.Tensor | None], order: float = 2.0) -> list[np.ndarray]:
    """For each tensor the sums of `|element| ** order` of its blocks: float64, on the host, which waits once for each other device.

    A tensor is a matrix of rows of which no rank has a part: see `rows_of` in marks.py. None has no blocks.
    """
    found: list[np.ndarray] = [np.empty(0)] * len(tensors)
    on_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            on_device.setdefault(tensor.device, []).append((index, _block_sums(tensor.detach(), order)))
    for its in on_device.values():
        values = torch.cat([sums for _, sums in its]).cpu()
        for (index, _), sums in zip(its, values.split([sums.numel() for _, sums in its]), strict=True):
            found[index] = sums.numpy()
    return found


def to_digits(values: np.ndarray) -> torch.Tensor:
    """The exact sum of float64 values of at least 0, as a float64 tensor of SLOTS elements."""
    total, rest = 0, 0.0
    for begin in range(0, len(values), _CHUNK):
        left = values[begin : begin + _CHUNK]
        while (largest := float(left.max())) >= 2.0**_LOWEST and largest < math.inf:
            # What the values have of the digit that begins the largest: multiples of its unit. Each operation is exact.
            digit = (math.frexp(largest)[1] - 1 - _LOWEST) // _BITS
            unit = 2.0 ** (digit * _BITS + _LOWEST)
            multiples = np.floor(left / unit)
            total += int(multiples.sum()) << (digit * _BITS)
            left = left - multiples * unit
        if not largest < math.inf:
            rest += float(left.sum())
    digits = np.frombuffer(total.to_bytes(_NUM_DIGITS * _BITS // 8, "little"), "<u4").astype(np.float64)
    return torch.from_numpy(np.append(digits, rest))


def to_float(message: Sequence[float]) -> float:
    """The float64 next to a sum of results of `to_digits`. A message without digits is the sum itself."""
    *digits, rest = message
    total = sum(int(digit) << (index * _BITS) for index, digit in enumerate(digits) if digit)
    try:
        return total / (1 << -_LOWEST) + rest
    except OverflowError:
        return math.inf + rest


def _block_sums(rows: torch.Tensor, order: float) -> torch.Tensor:
    rows = torch.view_as_real(rows.contiguous()) if rows.is_complex() else rows.contiguous().unsqueeze(2)
    length = rows.size(1)
    width = -(-length // -(-length // _BLOCK))  # of blocks that are about equal
    whole = length // width * width
    most = _PIECE if rows.device.type == "cpu" else _PIECE_ELSEWHERE
    found = []
    for piece in rows.split(max(most // length, 1)):
        for blocks in (piece[:, :whole].reshape(-1, width, rows.size(2)), piece[:, whole:]):
            if blocks.numel():
                found.append(_sum_of_squares(blocks.flatten(1) if order == 2 else _root_of_power(blocks, order)))
    return torch.cat(found)


def _root_of_power(numbers: torch.Tensor, order: float) -> torch.Tensor:
    """The roots of the powers of numbers with one part, or two if they are complex."""
    squares = numbers.double().square().sum(2)
    # torch computes the last elements, fewer than a vector register has, in another way than the others: here they are padding.
    padded = squares.new_zeros(-(-squares.numel() // 64) * 64)
    padded[: squares.numel()] = squares.flatten()
    return padded.pow_(order / 4)[: squares.numel()].view(squares.shape)


def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Of each row, in float64. The length of a row alone determines the order, not the number of rows or their place in memory."""
    if values.device.type == "cpu":
        # One pass over memory, which is not divided among threads, and as fast as torch's norm.
        numbers = values.to(torch.promote_types(values.dtype, torch.float32)).numpy()
        return torch.from_numpy(np.einsum("ij,ij->i", numbers, numbers).astype(np.float64))
    squares = values.double().square()  # GPUs have an order for each shape of a reduction, so here halves are added
    length = squares.size(1)
    while length > 1:
        half = (length + 1) // 2
        squares[:, : length - half] += squares[:, half:length]
        length = half
    return squares[:, 0].clone()
