"""The parts of compression that need no other rank."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpitrain
from mpitrain.sharding.compression.power_sgd import orthonormal


@given(st.data())
def test_orthonormal_rows_with_the_same_span(data: st.DataObject) -> None:
    length, count = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6))
    rank = data.draw(st.integers(0, count))
    draws = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = (draws.standard_normal((count, rank)) @ draws.standard_normal((rank, length))).astype(np.float32)
    rows *= np.float32(10.0) ** data.draw(st.integers(-15, 15))
    before = rows.copy()
    (found,) = orthonormal([rows])
    assert np.array_equal(rows, before) and found.dtype == np.float32
    products = found.astype(np.float64) @ found.T
    lengths = np.diag(products)
    assert np.all((abs(lengths - 1) < 1e-6) | (lengths == 0))
    assert abs(products - np.diag(lengths)).max() < 1e-6
    left = rows - rows.astype(np.float64) @ found.T @ found
    assert abs(left).max() <= 1e-5 * max(abs(rows).max(), 1e-30)


def test_rows_that_depend_on_others_become_zeros() -> None:
    one, other = np.eye(2, 9, dtype=np.float32)
    (found,) = orthonormal([np.stack([3 * one, 0 * one, one + 2 * other, one - 7 * other, other / 3])])
    assert np.array_equal(found, np.stack([one, 0 * one, other, 0 * one, 0 * one]))


def test_several_matrices_have_the_bits_of_each_alone() -> None:
    draws = np.random.default_rng(0)
    matrices = [draws.standard_normal((3, length)).astype(np.float32) for length in (17, 9, 17, 40_000)]
    for each, together in zip(matrices, orthonormal(matrices), strict=True):
        assert np.array_equal(orthonormal([each])[0], together)


def test_any_number_of_threads_decodes_the_same_bits() -> None:
    hook, before = mpitrain.power_sgd(3), torch.get_num_threads()
    code = torch.randn(3 * (1001 + 257), generator=torch.Generator().manual_seed(0)).view(torch.int32)
    decoded = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = torch.empty(1001, 257)
            hook.decode(code, out)
            decoded.append(out)
    finally:
        torch.set_num_threads(before)
    left, right = code.view(torch.float32).split([3 * 1001, 3 * 257])
    torch.testing.assert_close(decoded[0], left.view(3, -1).t() @ right.view(3, -1))
    assert torch.equal(decoded[0], decoded[1]) and torch.equal(decoded[0], decoded[2])


def test_a_direction_that_found_nothing_keeps_its_basis() -> None:
    """As with the zero gradient of a layer behind a matrix of zeros: its basis must not become zeros for ever."""
    hook = mpitrain.power_sgd(2, seed=3)
    basis = hook.basis(5, "a")
    assert torch.equal(basis, hook.basis(5, "a")) and not torch.equal(basis, hook.basis(5, "b"))
    found = torch.cat([torch.zeros(2 * 7), torch.zeros(5), torch.full((5,), 3e-20)])
    after = basis.clone()
    hook.next_basis(found.view(torch.int32), after)
    assert torch.equal(after[0], basis[0]) and 0.5 <= after[1].abs().max() < 1


def test_matrices_that_are_too_small_stay_exact() -> None:
    hook = mpitrain.power_sgd(4)
    assert hook.takes(16, 16) and not hook.takes(8, 8) and not hook.takes(1000, 4)
    assert mpitrain.top_k(0.01).takes(3, 3) and not mpitrain.top_k(0.4).takes(1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mpitrain.power_sgd(0), "power_sgd: rank is 0; expected at least 1"),
        (lambda: mpitrain.power_sgd(exact_steps=-1), "power_sgd: exact_steps is -1; expected at least 0"),
        (lambda: mpitrain.top_k(0.5), "top_k: share is 0.5; expected a number above 0 and below 0.5"),
        (lambda: mpitrain.top_k(clip_norm=0.0), "top_k: clip_norm is 0.0; expected a number above 0"),
        (lambda: mpitrain.top_k(0.01, 50), "takes from 0 to 1 positional argument"),
        (lambda: mpitrain.top_k(error_feedback=50), "top_k: error_feedback is 50; expected True or False"),
        (lambda: mpitrain.power_sgd(4.0), "power_sgd: rank is 4.0; expected a whole number"),
    ],
)
def test_wrong_arguments(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((TypeError, ValueError), match=message):
        make()
