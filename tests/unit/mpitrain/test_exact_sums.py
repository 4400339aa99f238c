"""Sums whose bits depend on the elements alone: not on the cut between ranks, on places in memory, or on the number of threads."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.optim.exact_sums import block_sums, to_digits, to_float


def number(*parts: np.ndarray) -> float:
    """The sum as ranks with these parts get it."""
    return to_float(sum(to_digits(part) for part in parts).tolist())  # type: ignore[union-attr]


# Below 2 ** -939 a float64 has bits below 2 ** -992, which are dropped.
NUMBERS = st.lists(st.one_of(st.just(0.0), st.floats(2.0**-939, 1e306)), max_size=30)


@given(NUMBERS, st.data())
def test_a_sum_is_exact_and_rounded_once(values: list[float], data: st.DataObject) -> None:
    """For any order of the numbers, and any cut of them among ranks."""
    order = data.draw(st.permutations(values))
    cut = data.draw(st.integers(0, len(values)))
    got = number(np.array(order[:cut]), np.array(order[cut:]))
    assert got == float(sum(map(Fraction, values)))


def test_a_sum_that_is_not_finite() -> None:
    one, inf, nan = (np.array([value]) for value in (1.0, math.inf, math.nan))
    assert number(one, inf) == math.inf and math.isnan(number(nan, one)) and math.isnan(number(inf, nan))
    assert number(np.array([1.7e308]), np.array([1.7e308])) == math.inf
    assert number(np.array([5e-324])) == 0.0 == number(np.empty(0))


# Lengths around those of vector registers and of blocks. Two pieces are computed with for 131 rows of 576, and for long rows.
LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 65, 129, 576, 1024, 1025, 3072, 20_001]


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        (torch.float32, 2.0),
        (torch.float64, 2.0),
        (torch.bfloat16, 2.0),
        (torch.complex64, 2.0),
        (torch.float32, 1.0),
        (torch.float32, 2.5),
        (torch.complex64, 3.0),
    ],
)
def test_a_row_has_the_same_sum_among_any_others(dtype: torch.dtype, order: float) -> None:
    """At other places in memory, among other numbers of rows, and with two threads. The sum is also right."""
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    try:
        for length in LENGTHS:
            count = 131 if length == 576 else 5
            flat = torch.randn(count * length + 64, dtype=torch.complex64, generator=generator)
            flat = flat.to(dtype) if dtype.is_complex else flat.real.to(dtype)
            torch.set_num_threads(1)
            rows = flat[: count * length].view(count, length)
            alone = block_sums([rows[i : i + 1] for i in range(count)], order)
            exact = rows.to(torch.promote_types(dtype, torch.float64)).abs().pow(order).sum(1).numpy()
            np.testing.assert_allclose([sums.sum() for sums in alone], exact, rtol=1e-6)
            for offset in (0, 1, 3, 13):
                torch.set_num_threads(1 if offset else 2)
                moved = flat.clone()[offset : offset + count * length].copy_(rows.flatten()).view(count, length)
                for begin, end in ((0, count), (0, 1), (1, 3), (offset % 4, count)):
                    (part,) = block_sums([moved[begin:end]], order)
                    assert np.array_equal(np.sort(part), np.sort(np.concatenate(alone[begin:end]))), (length, offset)
    finally:
        torch.set_num_threads(threads)
