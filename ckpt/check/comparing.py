"""The differences of two checkpoints, which may have other shards: tensor by tensor, slab by slab, in a few tens of MiB of memory."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt.check.statistics import Number
from ckpt.format.boxes import Box, pieces
from ckpt.format.manifest import named
from ckpt.reading.checkpoint import Checkpoint
from ckpt.reading.entry import TensorEntry
from ckpt.storage.progress import Progress, no_progress

_SLAB_BYTES = 16 << 20  # read at a time from each checkpoint: several chunks, so that few are read twice
_PIECE = 1 << 16  # elements compared at a time: as float64 they fit into the cache


class TensorDifference(NamedTuple):
    """A tensor that both checkpoints have, with differences.

    `num_differing` of `size` elements differ; for `num_special` of them one value is a NaN or an infinity and the other is not the
    same. `max_abs` and `max_rel` (relative to the larger value) are the largest differences of the others, 0 if there are none;
    `max_abs` is infinite if it is too large for float64. These four are None if the shapes differ: elements are not compared then.
    `first` is the index of the first differing element in row-major order, or None if no element differs or none is compared.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    size: int
    num_differing: int | None
    num_special: int | None
    max_abs: Number | None
    max_rel: float | None
    first: tuple[int, ...] | None


class MetaDifference(NamedTuple):
    """A value of the meta: its place ("settings.lr"), and for each checkpoint its JSON, or None if it is missing there."""

    key: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Difference:
    """All differences of checkpoints A and B. Names are sorted."""

    only_a: list[str]
    only_b: list[str]
    tensors: list[TensorDifference]
    meta: list[MetaDifference]
    num_compared: int

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.tensors or self.meta)


@dataclass
class _Tally:
    differing: int = 0
    special: int = 0
    first: int | None = None  # its flat position in the tensor
    max_abs: Number = 0
    max_rel: float = 0.0


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    only: Sequence[str] | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress = no_progress,
) -> Difference:
    """Compare the tensors' names, dtypes, shapes and elements, and the meta.

    Elements are the same if their bits are, or if they differ by at most `atol + rtol * max(|x|, |y|)`; with a tolerance above 0 any
    two NaNs are the same, too. Integers are subtracted exactly. `only`: patterns such as "model/*", to compare only these tensors, and
    no meta. `progress` gets the number of bytes of A compared since its last call. CheckpointError for damage.
    """
    names_a, names_b = (set(named(checkpoint, only or None)) for checkpoint in (a, b))
    common = sorted(names_a & names_b)
    found = (_compare_tensors(a[name], b[name], atol, rtol, progress) for name in common)
    return Difference(
        sorted(names_a - names_b),
        sorted(names_b - names_a),
        [difference for difference in found if difference is not None],
        [] if only else list(_compare_meta(a.meta, b.meta)),
        len(common),
    )


def _compare_tensors(
    a: TensorEntry, b: TensorEntry, atol: float, rtol: float, progress: Progress
) -> TensorDifference | None:
    dtypes, shapes = (a.dtype.name, b.dtype.name), (a.shape, b.shape)
    size = a.nbytes // a.dtype.itemsize
    if a.shape != b.shape:
        return TensorDifference(a.name, dtypes, shapes, size, None, None, None, None, None)
    tally, begin = _Tally(), 0
    for box in pieces(Box.full(a.shape), _SLAB_BYTES // max(a.dtype.itemsize, b.dtype.itemsize)):
        _compare_slab(tally, begin, a.read(box).reshape(-1), b.read(box).reshape(-1), atol, rtol)
        begin += box.size  # the pieces are flat ranges, in order
        progress(box.size * a.dtype.itemsize)
    if not tally.differing and a.dtype == b.dtype:
        return None
    first = None if tally.first is None else tuple(map(int, np.unravel_index(tally.first, a.shape)))
    return TensorDifference(
        a.name, dtypes, shapes, size, tally.differing, tally.special, tally.max_abs, tally.max_rel, first
    )


def _compare_slab(tally: _Tally, begin: int, x: np.ndarray, y: np.ndarray, atol: float, rtol: float) -> None:
    # A separate function, so that its arrays are freed before the next slabs are read.
    for first in range(0, x.size, _PIECE):
        _count(tally, begin + first, x[first : first + _PIECE], y[first : first + _PIECE], atol, rtol)


def _count(tally: _Tally, begin: int, x: np.ndarray, y: np.ndarray, atol: float, rtol: float) -> None:
    """Add the differences between `x` and `y`, 1-D and of one length, to the tally. `begin`: the flat position of their first."""
    at = None  # the positions of the elements that are left
    alike = x.dtype == y.dtype
    if alike:
        bits = np.dtype(f"{'u' if x.dtype.itemsize <= 8 else 'V'}{x.dtype.itemsize}")
        changed = x.view(bits) != y.view(bits)
        if not changed.any():
            return
        at = np.flatnonzero(changed)
        x, y = x[at], y[at]
    distance, magnitude = _distance(x, y)
    x, y = _widened(x, y)
    special = ~(np.isfinite(x) & np.isfinite(y))
    if alike and not (atol or rtol):
        differs = np.ones(x.size, bool)
    else:
        both_nan = np.isnan(x) & np.isnan(y)
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are compared by their bits
            tolerance = atol + rtol * magnitude
            if distance.dtype == np.uint64:  # float64 would round a large one
                far = (distance > tolerance.astype(np.uint64)) & (tolerance < 2.0**64)
            else:
                far = distance > tolerance
        differs = np.where(special, (x != y) & ~both_nan, far)
    if tally.first is None and differs.any():
        position = int(differs.argmax())
        tally.first = begin + (position if at is None else int(at[position]))
    tally.differing += int(differs.sum())
    tally.special += int((differs & special).sum())
    counted = differs & ~special
    if counted.any():
        tally.max_abs = max(tally.max_abs, distance[counted].max().item())
        counted &= magnitude > 0  # leaves out 0.0 and -0.0
        relative = distance[counted] / magnitude[counted]
        if np.isinf(relative).any():  # the distance overflows for numbers above half of float64's maximum
            x, y, magnitude = x[counted], y[counted], magnitude[counted]
            relative = np.where(np.isinf(relative), np.abs(x / magnitude - y / magnitude), relative)
        tally.max_rel = max(tally.max_rel, float(relative.max(initial=0.0)))


def _distance(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|x - y| and the larger of |x| and |y|, as float64; for integers of one dtype |x - y| is exact, as uint64."""
    numbers = _widened(x, y)
    magnitude = np.maximum(np.abs(numbers[0]), np.abs(numbers[1]))
    if x.dtype == y.dtype and x.dtype.kind in "iub":
        # Modulo 2**64, which is larger than every distance.
        return np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64), magnitude
    with np.errstate(over="ignore", invalid="ignore"):  # as above
        return np.abs(numbers[0] - numbers[1]), magnitude


def _widened(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64, or as complex128 if one of them is complex."""
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    return x.astype(wide), y.astype(wide)


def _compare_meta(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[MetaDifference]:
    ours, theirs = _leaves(a), _leaves(b)
    for path in dict.fromkeys([*ours, *theirs]):
        if ours.get(path) != theirs.get(path):
            key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
            yield MetaDifference(key.removeprefix("."), ours.get(path), theirs.get(path))


def _leaves(meta: Mapping[str, Any]) -> dict[tuple[str | int, ...], str]:
    """The values in nested dicts and lists as JSON, by the keys and indices that lead to them. Not recursive, as they may be deep."""
    leaves: dict[tuple[str | int, ...], str] = {}
    left: list[tuple[tuple[str | int, ...], Any]] = [((), meta)]
    while left:
        path, value = left.pop()
        if value and isinstance(value, Mapping | list):
            items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
            left += [((*path, part), item) for part, item in reversed(items)]
        elif path:  # an empty meta has no path
            leaves[path] = json.dumps(value)
    return leaves
