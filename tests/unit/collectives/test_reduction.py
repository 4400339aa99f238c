"""Element-wise reductions against exact arithmetic: halves are added in fp32 and rounded once."""

import sys
from typing import Any

import numpy as np
import pytest
import torch  # noqa: F401 - reductions use its kernels where it is loaded
from hypothesis import given
from hypothesis import strategies as st

from collectives.arrays.dtypes import ARITHMETIC, TABLE
from collectives.arrays.reduction import BLOCK_BYTES, divide, reduce_into

HALVES = [row for row in TABLE.values() if row.is_half]


def reference(parts: list[np.ndarray], op: str, divisor: int = 1) -> np.ndarray:
    """Left to right in the accumulating type, one operation on whole arrays at a time, one rounding at the end."""
    dtype = parts[0].dtype
    total = parts[0].astype(TABLE[dtype.name].accumulate)
    for part in parts[1:]:
        wide = part.astype(total.dtype)
        match op:
            case "sum" | "avg":
                total = total + wide
            case "prod":
                total = total * wide
            case "max":
                total = np.where(wide > total, wide, total)
            case "min":
                total = np.where(wide < total, wide, total)
    return (total / total.dtype.type(divisor) if divisor != 1 else total).astype(dtype)


def random_parts(name: str, num_parts: int, size: int, seed: int) -> list[np.ndarray]:
    rng, dtype = np.random.default_rng(seed), TABLE[name].numpy
    if name == "bool":
        return [rng.integers(0, 2, size).astype(bool) for _ in range(num_parts)]
    if "float" in name:
        return [rng.standard_normal(size).astype(dtype) for _ in range(num_parts)]
    info = np.iinfo(dtype)
    return [rng.integers(info.min, info.max, size, dtype, endpoint=True) for _ in range(num_parts)]


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()


@given(
    name=st.sampled_from(sorted(set(TABLE) - {"bool"})),
    op=st.sampled_from(sorted(ARITHMETIC)),
    num_parts=st.integers(1, 5),
    size=st.sampled_from([0, 1, 2, 7, 100]),
    seed=st.integers(0, 2**32),
    alias=st.integers(0, 4),
)
def test_equals_the_reference_bit_for_bit(name: str, op: str, num_parts: int, size: int, seed: int, alias: int) -> None:
    parts = random_parts(name, num_parts, size, seed)
    expected = reference(parts, op)
    fresh = np.empty(size, TABLE[name].numpy)
    reduce_into(fresh, parts, op, TABLE[name])
    assert bits(fresh) == bits(expected)
    # `out` may be one of the parts, and the others stay as they are
    alias %= num_parts
    before = [part.copy() for part in parts]
    reduce_into(parts[alias], parts, op, TABLE[name])
    before[alias] = expected
    assert [bits(part) for part in parts] == [bits(part) for part in before]


@pytest.mark.rest
@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("more", [-1, 0, 1, BLOCK_BYTES // 2 + 3])
@pytest.mark.parametrize("with_torch", [True, False])
def test_borders_of_blocks(name: str, more: int, with_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves are added by torch's kernels or by NumPy's: the same bits."""
    assert "torch" in sys.modules
    if not with_torch:
        monkeypatch.delitem(sys.modules, "torch")
    size = BLOCK_BYTES // TABLE[name].itemsize + more
    for num_parts in (1, 2, 3):
        parts = random_parts(name, num_parts, size, seed=size)
        expected = reference(parts, "sum")
        reduce_into(parts[-1], parts, "sum", TABLE[name])
        assert bits(parts[-1]) == bits(expected)


@pytest.mark.parametrize("row", HALVES, ids=lambda row: row.name)
def test_halves_are_rounded_once(row: Any) -> None:
    # 256 + 1 + 1: bf16 has 8 bits, so that adding in bf16 would stay at 256; fp16 likewise at 2048
    large = {"bfloat16": 256, "float16": 2048}[row.name]
    parts = [np.full(3, value, row.numpy) for value in (large, 1, 1)]
    out = np.empty(3, row.numpy)
    reduce_into(out, parts, "sum", row)
    assert out.astype(float).tolist() == [large + 2] * 3
    assert (parts[0] + parts[1] + parts[2]).astype(float).tolist() == [large] * 3  # what it must not be


@given(st.lists(st.floats(-1000, 1000, width=16), min_size=2, max_size=6), st.sampled_from(HALVES))
def test_sums_of_halves_are_the_nearest_halves_of_the_exact_sum(values: list[float], row: Any) -> None:
    # multiples of 2**-24 below 8192: fp64 adds them exactly, fp32 within 24 bits, so allow fp32's own rounding
    parts = [np.array([value]).astype(row.numpy) for value in values]
    exact = sum(float(part[0]) for part in parts)
    out = np.empty(1, row.numpy)
    reduce_into(out, parts, "sum", row)
    error = abs(float(out[0]) - exact)
    half_a_step = (
        float(np.abs(np.spacing(np.float32(exact)))) * 2 ** (23 - {"float16": 10, "bfloat16": 7}[row.name]) / 2
    )
    fp32_adds = sum(abs(float(part[0])) for part in parts) * len(parts) * 2.0**-24
    smallest = float(np.finfo(np.float16).smallest_subnormal) / 2 if row.name == "float16" else 0.0
    assert error <= max(half_a_step, smallest) + fp32_adds


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7])
def test_averages_divide_once_at_the_end(name: str, divisor: int) -> None:
    parts = random_parts(name, 3, 50, seed=divisor)
    out = np.empty_like(parts[0])
    reduce_into(out, parts, "avg", TABLE[name], divisor=divisor)
    assert bits(out) == bits(reference(parts, "avg", divisor))
    x = parts[0].copy()
    divide(x, divisor, TABLE[name])
    assert bits(x) == bits(reference([parts[0]], "avg", divisor))


def test_an_average_of_large_halves_does_not_overflow_on_the_way() -> None:
    parts = [np.full(2, 60000, np.float16) for _ in range(3)]
    out = np.empty(2, np.float16)
    reduce_into(out, parts, "avg", TABLE["float16"], divisor=3)
    assert out.tolist() == [60000.0, 60000.0]


def test_overflow_is_infinity_and_no_warning() -> None:
    for name, large in (("float16", 60000), ("float32", 3e38), ("bfloat16", 3e38)):
        parts = [np.full(1, large, TABLE[name].numpy) for _ in range(2)]
        reduce_into(parts[0], parts, "sum", TABLE[name])
        assert float(parts[0][0]) == float("inf")


def test_nan_wins_in_max_and_min() -> None:
    for row in (TABLE["float32"], TABLE["bfloat16"]):
        for op in ("max", "min"):
            parts = [np.array([1, np.nan]).astype(row.numpy), np.array([np.nan, 1]).astype(row.numpy)]
            reduce_into(parts[0], parts, op, row)
            assert np.isnan(parts[0].astype(np.float32)).all()


def test_integers_wrap_around_and_truth_values_stay_so() -> None:
    parts = [np.array([200], np.uint8), np.array([100], np.uint8)]
    reduce_into(parts[0], parts, "sum", TABLE["uint8"])
    assert parts[0].tolist() == [44]
    truths = [np.array([True, True, False, False]), np.array([True, False, True, False])]
    out = np.empty(4, bool)
    reduce_into(out, truths, "max", TABLE["bool"])
    assert out.tolist() == [True, True, True, False]
    reduce_into(out, truths, "min", TABLE["bool"])
    assert out.tolist() == [True, False, False, False]
