"""What tensors' values are like and what two checkpoints differ in, against NumPy's own answers; and how much memory it takes."""

import math
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import pytest
from checkpoints import flip_bit
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from thread_ranks import on_ranks

import ckpt
from ckpt.check import comparing, statistics
from ckpt.check.comparing import compare
from ckpt.check.statistics import histogram_of, statistics_of
from ckpt.format.boxes import Box, pieces

DTYPES = ["f8", "f4", "f2", ml_dtypes.bfloat16, "i8", "i1", "u8", "u4", "bool"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    if dtype.kind in "iub":
        return draw(hnp.arrays(dtype, shape))
    with np.errstate(over="ignore"):
        return draw(hnp.arrays("f4", shape, elements=st.floats(width=32))).astype(dtype)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays are then put together from several pieces, as large ones are."""
    monkeypatch.setattr(statistics, "_PIECE", 7)
    monkeypatch.setattr(comparing, "_PIECE", 7)
    monkeypatch.setattr(comparing, "_SLAB_BYTES", 40)


def save_cut(path: Path, array: np.ndarray, size: int, dim: int) -> ckpt.Checkpoint:
    """Saved by `size` ranks, each with a part of dimension `dim`."""

    def act(comm):
        bounds = [array.shape[dim] * rank // size for rank in range(size + 1)]
        place = (slice(None),) * dim + (slice(bounds[comm.rank], bounds[comm.rank + 1]),)
        offset = [bounds[comm.rank] if d == dim else 0 for d in range(array.ndim)]
        axes = ["dp_shard" if d == dim else None for d in range(array.ndim)]
        data = np.ascontiguousarray(array[place])
        ckpt.save(path, {"x": ckpt.Shard(data, array.shape, offset, axes)}, comm=comm)

    on_ranks(size, act)
    return ckpt.open(path)


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=25, deadline=None)
@given(array=SHAPES.flatmap(arrays))
def test_statistics_are_numpys(array: np.ndarray) -> None:
    with TemporaryDirectory() as folder:
        entry = ckpt.open(ckpt.save(f"{folder}/a", {"x": array}, comm=None))["x"]
        stats = statistics_of(entry)
        histogram = histogram_of(entry, stats, 5)
    numbers = array.astype("f8")
    finite = numbers[np.isfinite(numbers)]
    assert (stats.num_finite, stats.num_nan, stats.num_inf) == (
        finite.size,
        np.isnan(numbers).sum(),
        np.isinf(numbers).sum(),
    )
    assert sum(histogram.counts) == finite.size
    if not finite.size:
        assert stats[1:5] == (None,) * 4 and histogram.edges == []
        return
    if array.dtype.kind in "iub":
        assert (stats.min, stats.max) == (int(array.min()), int(array.max()))  # all digits of a uint64
    else:
        assert (stats.min, stats.max) == (finite.min(), finite.max())
    # Rounding errors of float64 are relative to the largest value.
    scale = max(np.abs(finite).max(), 1e-300)
    assert stats.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-13 * scale)
    assert stats.std == pytest.approx(finite.std(), rel=1e-9, abs=1e-13 * scale)
    assert histogram.edges == sorted(set(histogram.edges)) and len(histogram.edges) == len(histogram.counts) + 1
    assert histogram.counts == np.histogram(finite, histogram.edges)[0].tolist()


@pytest.mark.parametrize(
    ("values", "edges", "counts"),
    [
        (np.array([3, 5, 5], "i4"), [2.5, 3.5, 4.5, 5.5], [1, 0, 2]),  # a few integers: a bin each
        (np.array([True, False, True]), [-0.5, 0.5, 1.5], [1, 2]),
        (np.array([0.0, 1.0, 4.0, np.nan]), [0.0, 1.0, 2.0, 3.0, 4.0], [1, 1, 0, 1]),
        (np.full(3, 7.0), [6.5, 6.75, 7.0, 7.25, 7.5], [0, 0, 3, 0]),  # all the same
        (np.array([5e-324, 1.5e-323]), [5e-324, 1e-323, 1.5e-323], [1, 1]),  # no room for more bins
        (np.array([-1.7e308, 1.7e308]), [-1.7e308, -8.5e307, 0.0, 8.5e307, 1.7e308], [1, 0, 0, 1]),
    ],
)
def test_histograms(tmp_path: Path, values: np.ndarray, edges: list[float], counts: list[int]) -> None:
    entry = ckpt.open(ckpt.save(tmp_path / "a", {"x": values}, comm=None))["x"]
    assert histogram_of(entry, statistics_of(entry), 4) == (pytest.approx(edges, rel=1e-15), counts)


def test_the_deviation_of_huge_numbers_and_of_large_close_ones(tmp_path: Path) -> None:
    huge = np.array([1.7e308, 1.7e308, -1.7e308, 1.7e308])
    tensors = {"huge": huge, "long": np.tile(huge, 1 << 16), "close": 1e9 + np.tile([0.0, 2.0], 1 << 17)}
    tensors |= {"ends": np.repeat([-1.7e308, 1.7e308], 1 << 16)}  # the distance of the pieces' means is none of float64
    checkpoint = ckpt.open(ckpt.save(tmp_path / "a", tensors, comm=None))
    for name in ("huge", "long"):
        expected = (huge / 1e308).mean() * 1e308, (huge / 1e308).std() * 1e308
        assert statistics_of(checkpoint[name])[1:3] == pytest.approx(expected, rel=1e-14)
    assert statistics_of(checkpoint["ends"])[1:3] == pytest.approx((0, 1.7e308), rel=1e-14)
    assert statistics_of(checkpoint["close"])[1:3] == (1e9 + 1, pytest.approx(1.0, rel=1e-15))


def test_differences_of_huge_numbers(tmp_path: Path) -> None:
    values = np.array([1e308, 1.0, 1e308, 3.0]), np.array([-1e308, 1.5, 0.5e308, 3.0])
    a, b = (ckpt.open(ckpt.save(tmp_path / str(i), {"x": x}, comm=None)) for i, x in enumerate(values))
    (found,) = compare(a, b).tensors
    assert (found.num_differing, found.num_special, found.max_abs, found.max_rel) == (3, 0, math.inf, 2.0)


@given(shape=SHAPES, limit=st.integers(1, 40))
def test_pieces_cover_a_tensor_in_flat_order(shape: tuple[int, ...], limit: int) -> None:
    positions = np.arange(math.prod(shape)).reshape(shape)
    parts = [positions[box.slices].reshape(-1) for box in pieces(Box.full(shape), limit)]
    assert all(0 < part.size <= limit for part in parts)
    assert np.concatenate([*parts, np.empty(0, int)]).tolist() == list(range(positions.size))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one shape: often of one dtype, often the same in many places."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6))
    a = draw(arrays(shape))
    b = draw(arrays(shape))
    if draw(st.booleans()):
        with np.errstate(all="ignore"):
            b = np.where(draw(hnp.arrays(bool, shape)), a, b.astype(a.dtype)).astype(a.dtype)
    return a, b


@pytest.mark.rest
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # in `pairs`
@settings(max_examples=25, deadline=None)
@given(
    pair=pairs(),
    tolerances=st.sampled_from([(0.0, 0.0), (0.5, 0.0), (0.0, 0.1), (2.0, 1.0)]),
    cuts=st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(0, 2)),
)
def test_differences_are_numpys(
    pair: tuple[np.ndarray, np.ndarray], tolerances: tuple[float, float], cuts: tuple[int, ...]
) -> None:
    a, b = pair
    atol, rtol = tolerances
    with TemporaryDirectory() as folder:
        first = save_cut(Path(folder, "a"), a, cuts[0], cuts[1] % a.ndim)
        second = save_cut(Path(folder, "b"), b, cuts[2], cuts[3] % a.ndim)
        found = compare(first, second, atol=atol, rtol=rtol)
    differs, finite, distances, relative = expected(a, b, atol, rtol)
    if not differs.any() and a.dtype == b.dtype:
        assert not found
        return
    (difference,) = found.tensors
    assert difference.dtypes == (a.dtype.name, b.dtype.name) and difference.size == a.size
    assert difference.num_differing == differs.sum()
    assert difference.num_special == (differs & ~finite).sum()
    assert difference.max_abs == max(distances, default=0)
    assert difference.max_rel == pytest.approx(max(relative, default=0.0))


def expected(a: np.ndarray, b: np.ndarray, atol: float, rtol: float) -> tuple:
    """Which elements differ, which pairs are finite, and how far the finite ones that differ are apart: in Python's numbers."""
    same_kind = a.dtype == b.dtype
    whole = same_kind and a.dtype.kind in "iub"
    x, y = a.astype("f8"), b.astype("f8")
    finite = np.isfinite(x) & np.isfinite(y)
    differs = np.zeros(a.shape, bool)
    distances, relative = [], []
    for at in np.ndindex(a.shape):
        if whole:
            distance = abs(int(a[at]) - int(b[at]))
        else:
            distance = abs(float(x[at]) - float(y[at]))
        largest = max(abs(float(x[at])), abs(float(y[at])))
        if same_kind and not (atol or rtol):
            differs[at] = a[at].tobytes() != b[at].tobytes()
        elif finite[at]:
            differs[at] = distance > atol + rtol * largest
        else:
            differs[at] = not (x[at] == y[at] or (np.isnan(x[at]) and np.isnan(y[at])))
        if differs[at] and finite[at]:
            distances.append(distance)
            relative += [distance / largest] if largest else []
    return differs, finite, distances, relative


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["c8", "c16"])
def test_complex_numbers(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 9)) + 1j * rng.normal(size=(5, 9))).astype(kind)
    x[0, :3] = complex(np.nan, 1), complex(0, np.inf), 0
    y = x.copy()
    y[2:] += np.array(0.5 - 1j, kind)
    y[0, :2] = 1
    a, b = (ckpt.open(ckpt.save(tmp_path / name, {"x": value}, comm=None)) for name, value in (("a", x), ("b", y)))
    sizes = np.abs(x[np.isfinite(x)].astype("c16"))
    assert statistics_of(a["x"]) == (43, pytest.approx(sizes.mean()), pytest.approx(sizes.std()), 0, sizes.max(), 1, 1)
    assert sum(histogram_of(a["x"], statistics_of(a["x"]), 4).counts) == 43
    (found,) = compare(a, b).tensors
    apart = np.abs(x[2:].astype("c16") - y[2:])
    largest = np.maximum(np.abs(x[2:].astype("c16")), np.abs(y[2:].astype("c16")))
    assert (found.num_differing, found.num_special) == (2 + 27, 2)
    assert (found.max_abs, found.max_rel) == pytest.approx((apart.max(), (apart / largest).max()))
    assert compare(a, b, atol=2.0).tensors[0].num_differing == 2
    assert not compare(a, a) and not compare(a, ckpt.open(ckpt.save(tmp_path / "c", {"x": x}, comm=None)), atol=1.0)
    real = ckpt.open(ckpt.save(tmp_path / "r", {"x": np.ascontiguousarray(x.real)}, comm=None))
    assert compare(a, real).tensors[0].max_abs == pytest.approx(np.abs(x.imag[np.isfinite(x)]).max())


def test_float8(tmp_path: Path) -> None:
    x = np.array([1.5, -448, np.nan, 0.25], ml_dtypes.float8_e4m3fn)
    y = np.array([1.5, 448, np.nan, 0.5], ml_dtypes.float8_e4m3fn)
    a, b = (ckpt.open(ckpt.save(tmp_path / name, {"x": value}, comm=None)) for name, value in (("a", x), ("b", y)))
    assert statistics_of(a["x"])[3:] == (-448, 1.5, 1, 0)
    (found,) = compare(a, b).tensors
    assert (found.num_differing, found.num_special, found.max_abs, found.max_rel) == (2, 0, 896, 2.0)


def test_integers_are_subtracted_exactly(tmp_path: Path) -> None:
    low, high = np.iinfo("i8").min, np.iinfo("i8").max
    first = ckpt.open(ckpt.save(tmp_path / "a", {"x": np.array([low, high, 5])}, comm=None))
    second = ckpt.open(ckpt.save(tmp_path / "b", {"x": np.array([high, high - 1, 5])}, comm=None))
    (difference,) = compare(first, second).tensors
    assert (difference.num_differing, difference.max_abs) == (2, 2**64 - 1)


def test_meta_is_compared_leaf_by_leaf(tmp_path: Path) -> None:
    metas = (
        {"step": 1, "a.b": 1, "same": {"x": [1, {"y": None}]}, "list": [1, 2], "nan": math.nan, "gone": {"deep": True}},
        {"step": 2, "a": {"b": 1}, "same": {"x": [1, {"y": None}]}, "list": [1], "nan": math.nan, "empty": {}},
    )
    first, second = (ckpt.open(ckpt.save(tmp_path / f"{i}", {}, comm=None, meta=meta)) for i, meta in enumerate(metas))
    assert [tuple(found) for found in compare(first, second).meta] == [
        ("step", "1", "2"),
        ("a.b", "1", None),
        ("list[1]", "2", None),
        ("gone.deep", "true", None),
        ("a.b", None, "1"),
        ("empty", None, "{}"),
    ]
    assert not compare(first, second, only=["*"])


@pytest.fixture
def large(tmp_path: Path) -> tuple[ckpt.Checkpoint, ckpt.Checkpoint]:
    """Two tensors of 64 MiB: cut between rows and between columns, nowhere the same."""
    shape = (1024, 16384)
    return save_cut(tmp_path / "a", np.zeros(shape, "f4"), 2, 0), save_cut(tmp_path / "b", np.ones(shape, "f4"), 2, 1)


@pytest.mark.rest
def test_memory_is_bounded_however_large_a_tensor_is(large: tuple[ckpt.Checkpoint, ckpt.Checkpoint]) -> None:
    first, second = large
    tracemalloc.start()
    try:
        stats = statistics_of(second["x"])
        histogram = histogram_of(second["x"], stats, 10)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
        tracemalloc.reset_peak()
        (difference,) = compare(first, second).tensors
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()
    size = 64 << 18
    assert stats == (size, 1.0, 0.0, 1.0, 1.0, 0, 0) and sum(histogram.counts) == size
    assert (difference.num_differing, difference.max_abs) == (size, 1.0)


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    checkpoint = save_cut(tmp_path / "a", np.arange(600.0).reshape(20, 30), 3, 1)
    seen: list[int] = []
    statistics_of(checkpoint["x"], seen.append)
    assert sum(seen) == 4800
    seen.clear()
    compare(checkpoint, checkpoint, progress=seen.append)
    assert sum(seen) == 4800
    seen.clear()
    assert ckpt.verify(checkpoint.path, progress=seen.append) == []
    assert sum(seen) == sum(checkpoint.files.values())


def test_damage_is_found_on_the_way(tmp_path: Path) -> None:
    checkpoint = save_cut(tmp_path / "a", np.arange(8.0), 1, 0)
    flip_bit(tmp_path / "a" / "rank-00000.h5", np.arange(8.0).tobytes())
    for look in (lambda: statistics_of(checkpoint["x"]), lambda: compare(checkpoint, checkpoint)):
        with pytest.raises(ckpt.CheckpointError, match=r"tensor 'x': rank-00000\.h5 is damaged"):
            look()
