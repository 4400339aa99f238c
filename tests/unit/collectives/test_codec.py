"""The codec of links: what its formats keep, and that all implementations give the same bits."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.codec import coding
from collectives.codec.choice import available
from collectives.codec.formats import BLOCK, FORMATS, Codec, Format

LOSSY = [fmt for fmt in FORMATS.values() if not fmt.is_exact]
SCALED = [FORMATS["int8"], FORMATS["fp8"]]
CODECS = available().codecs
MAX = np.float32(np.finfo(np.float32).max)
SPECIAL = np.array(
    [0, -0.0, np.nan, np.inf, -np.inf, MAX, -MAX, 1e-45, -1e-45, 2.0**-126, 2.0**-120, 65520], np.float32
)
SIZES = (0, 1, 255, 256, 257, 511, 1000, 64 * BLOCK + 3)


def coded(fmt: Format, x: np.ndarray, by: Codec = CODECS["numpy"]) -> np.ndarray:
    data = np.full(fmt.nbytes(x.size), 0xAB, np.uint8)
    by.encode(fmt, x, data)
    return data


def decoded(fmt: Format, x: np.ndarray, by: Codec = CODECS["numpy"]) -> np.ndarray:
    out = np.full(x.size, 7, np.float32)
    by.decode(fmt, coded(fmt, x, by), out)
    return out


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_sizes(fmt: Format) -> None:
    scales = {0: 0, 1: 1, 255: 1, 256: 1, 257: 2, 511: 2, 1000: 4, 64 * BLOCK + 3: 65}
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}[fmt.name]
    for count, num in scales.items():
        assert fmt.nbytes(count) == size * count + (4 * num if size == 1 else 0)
    x = np.random.default_rng(0).standard_normal(1000, dtype=np.float32)
    whole = coded(fmt, x)
    parts = [coded(fmt, x[start : start + 512]) for start in (0, 512)]
    assert np.array_equal(whole, np.concatenate(parts)), "a slice at a block is a slice of the data"


# The same bits


def compare(fmt: Format, x: np.ndarray, total: np.ndarray, offset: int = 0) -> None:
    """All implementations against NumPy, on data and elements that need not be aligned, and which they must not leave."""
    results = {}

    def placed(*parts: np.ndarray) -> np.ndarray:
        elements = np.concatenate(parts)
        room = np.empty(elements.nbytes + offset, np.uint8)[offset:].view(np.float32)
        room[:] = elements
        return room

    x = placed(x)
    for name, each in CODECS.items():
        room = np.full(fmt.nbytes(x.size) + offset + 1, 0xAB, np.uint8)
        data = room[offset:-1]
        out, added = placed(np.full(x.size + 1, 7, np.float32)), placed(total, np.float32([7]))
        each.encode(fmt, x, data)
        each.decode(fmt, data, out[:-1])
        each.decode_add(fmt, data, added[:-1])
        assert (room[:offset] == 0xAB).all() and (room[-1], out[-1], added[-1]) == (0xAB, 7, 7)
        results[name] = data, bits(out), bits(added)
    for name, result in results.items():
        for what, one, other in zip(("encode", "decode", "decode_add"), result, results["numpy"], strict=True):
            assert np.array_equal(one, other), (fmt.name, name, what, np.flatnonzero(one != other)[:5])


@pytest.mark.rest
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@settings(deadline=None, max_examples=60)
@given(
    st.one_of(st.sampled_from(SIZES), st.integers(0, 1100)),
    st.integers(0, 2**32 - 1),
    st.one_of(st.none(), st.integers(-149, 127)),
    st.lists(st.tuples(st.integers(0, 1100), st.sampled_from(SPECIAL.tolist())), max_size=4),
    st.integers(0, 3),
)
def test_all_implementations_give_the_same_bits(
    fmt: Format, size: int, seed: int, exponent: int | None, special: list[tuple[int, float]], offset: int
) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        if exponent is None:
            x = rng.integers(0, 2**32, size, np.uint32).view(np.float32)  # with NaNs and infinities
        else:
            x = (rng.standard_normal(size) * 2.0**exponent).astype(np.float32)
    for place, value in special:
        if place < size:
            x[place] = value
    compare(fmt, x, rng.standard_normal(size, dtype=np.float32), offset)


@pytest.mark.parametrize("fmt", LOSSY, ids=lambda fmt: fmt.name)
def test_every_step_of_the_numbers(fmt: Format) -> None:
    """All upper halves of float32 with the lower halves at which rounding changes, a 448 in each block, so that fp8 is not scaled."""
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32)
    x = (upper << 16 | lower[:, None]).reshape(-1).view(np.float32)
    if fmt.name in ("bf16", "fp16"):
        compare(fmt, x, np.ones(x.size, np.float32))
        number = np.dtype(ml_dtypes.bfloat16 if fmt.name == "bf16" else np.float16)
        with np.errstate(all="ignore"):
            expected = x.astype(number).astype(np.float32)
        assert np.array_equal(decoded(fmt, x), expected, equal_nan=True)
        assert np.array_equal(np.signbit(decoded(fmt, x)), np.signbit(x)), "also of NaN"
        return
    x = x[np.abs(x) <= 448]
    x = np.insert(x, np.arange(0, x.size, BLOCK - 1), 448)
    compare(fmt, x, np.ones(x.size, np.float32))
    if fmt.name == "fp8":
        expected = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert np.array_equal(bits(decoded(fmt, x)), bits(expected))


# What the formats keep


@pytest.fixture(params=CODECS)
def by(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
def test_errors_are_half_a_step_of_the_block(fmt: Format, by: Codec) -> None:
    rng = np.random.default_rng(1)
    for exponent in (-100, 0, 120):
        x = (rng.standard_normal(1000) * 2.0 ** (exponent + rng.integers(-9, 3, 1000))).astype(np.float32)
        out = decoded(fmt, x, by).astype(np.float64)
        for start in range(0, x.size, BLOCK):
            block, largest = x[start : start + BLOCK].astype(np.float64), np.abs(x[start : start + BLOCK]).max()
            step = largest / 127 if fmt.name == "int8" else np.maximum(np.abs(block) / 8, largest / 448 / 2**9)
            assert (np.abs(out[start : start + BLOCK] - block) <= step / 2 * (1 + 2.0**-20)).all()
            assert np.abs(out[start : start + BLOCK]).max() == pytest.approx(largest, rel=2.0**-23)


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_nan_or_infinity_is_nan(fmt: Format, bad: float, by: Codec) -> None:
    x = np.ones(3 * BLOCK, np.float32)
    x[BLOCK + 100] = bad
    out = decoded(fmt, x, by)
    assert np.isnan(out[BLOCK : 2 * BLOCK]).all()
    assert (np.delete(out, np.s_[BLOCK : 2 * BLOCK]) == 1).all()


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
def test_the_ends_of_the_range(fmt: Format, by: Codec) -> None:
    def of(*values: float) -> list[float]:
        return decoded(fmt, np.array(values, np.float32), by).tolist()

    assert np.isfinite(of(float(MAX), float(-MAX), 1e38)).all(), "the scale of the largest number does not overflow"
    assert of(float(MAX))[0] == pytest.approx(float(MAX), rel=2.0**-23)
    # a scale never underflows: a block of small numbers is a multiple of 2^-126
    assert of(0, 2.0**-126, -(2.0**-126), 2.0**-128, 1e-45) == [0, 2.0**-126, -(2.0**-126), 0, 0]
    (zero, one) = decoded(fmt, np.array([-0.0, 1], np.float32), by)
    assert (bool(np.signbit(zero)), one) == (fmt.name == "fp8", 1), "int8 has no -0"


def test_halves_keep_zeros_denormals_infinities_and_nan(by: Codec) -> None:
    x = np.array([-0.0, np.inf, -np.inf, 2.0**-130, 2.0**-24, 65519, 65520, np.nan], np.float32)
    assert decoded(FORMATS["bf16"], x, by)[:5].tolist() == [0, np.inf, -np.inf, 2.0**-130, 2.0**-24]
    assert decoded(FORMATS["fp16"], x, by)[:7].tolist() == [0, np.inf, -np.inf, 0, 2.0**-24, 65504, np.inf]
    for name in ("bf16", "fp16"):
        out = decoded(FORMATS[name], x, by)
        assert np.signbit(out[0]) and np.isnan(out[-1])


# Arguments


def test_wrong_arrays_are_refused() -> None:
    fmt, x = FORMATS["int8"], np.ones(300, np.float32)
    data = np.zeros(fmt.nbytes(300), np.uint8)
    read_only = data.copy()
    read_only.flags.writeable = False
    for wrong, out, expected in (
        (x.astype(np.float64), data, "contiguous float64 of shape (300,); expected contiguous float32 of shape (300,)"),
        (x.reshape(30, 10), data, "float32 of shape (30, 10); expected contiguous float32 of shape (300,)"),
        (np.ones(600, np.float32)[::2], data, "strided float32 of shape (300,)"),
        (x, data[1:], "uint8 of shape (307,); expected contiguous uint8 of shape (308,)"),
        (x, data.view(np.int8), "data in int8: contiguous int8 of shape (308,); expected contiguous uint8"),
        (x, read_only, "read-only"),
    ):
        with pytest.raises(ValueError) as error:
            coding.encode(fmt, wrong, out)
        assert expected in str(error.value)
    for read in (coding.decode, coding.decode_add):
        with pytest.raises(ValueError, match="expected contiguous uint8 of shape"):
            read(fmt, data[1:], x)
    coding.encode(fmt, x, data)
    coding.decode_add(fmt, data, x)
    assert (x == 2).all()
