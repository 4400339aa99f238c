"""The differences of two records of steps. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckpt.format.manifest import named
from mpitrain.job.record.files.metrics import REPRODUCIBLE
from mpitrain.view.reading.run import RunRecord, is_of_layers
from mpitrain.view.reading.tables import Array, Table


class MetricDifference(NamedTuple):
    """A metric that both runs have. `num_steps` steps of both have been compared; `num_differing` of them differ.

    `first` is the first step that differs, with the values there; NaN is a value that is missing or not finite. `max_abs` and
    `max_rel` (relative to the larger value) are the largest differences where both are numbers.
    """

    name: str
    num_steps: int
    num_differing: int
    first: int | None
    a: float
    b: float
    max_abs: float
    max_rel: float

    @property
    def relative(self) -> float:
        """The relative difference in the first step that differs; NaN if it has none."""
        return float(_relative(np.array(self.a), np.array(self.b)))


class MetricsDifference(NamedTuple):
    """The comparison of two records."""

    metrics: list[MetricDifference]
    """Of all metrics that were compared, also those that do not differ."""
    num_steps: int
    """Steps that both runs have."""
    only_a: list[int]
    only_b: list[int]
    """Steps that one run has."""
    one_sided: list[str]
    """Metrics that one run has, so that they are not compared. A setting decides whether a run has them."""

    @property
    def differing(self) -> list[MetricDifference]:
        """Those that differ, in the order of their first step."""
        return sorted((each for each in self.metrics if each.num_differing), key=lambda each: each.first or 0)


def compare(a: RunRecord, b: RunRecord, only: Sequence[str] | None) -> MetricsDifference:
    """Compare the metrics that settings and data alone decide, in the steps that both runs have. `only`: patterns of other ones."""
    found: list[MetricDifference] = []
    one_sided: list[str] = []
    for of_a, of_b in ((a.steps, b.steps), (a.evaluations, b.evaluations), (a.layers, b.layers)):
        names = list({**of_a.columns, **of_b.columns})
        wanted = named(names, only) if only else list(filter(_is_reproducible, names))
        common, rows_a, rows_b = np.intersect1d(of_a.step, of_b.step, assume_unique=True, return_indices=True)
        for name in sorted(wanted, key=_rank):
            if not len(common):
                continue
            if name == "skipped" or (name in of_a.columns and name in of_b.columns):
                found.append(_compare(name, common, _column(of_a, name)[rows_a], _column(of_b, name)[rows_b]))
            else:
                one_sided.append(name)
    only_a, only_b = np.setdiff1d(a.steps.step, b.steps.step), np.setdiff1d(b.steps.step, a.steps.step)
    num_common = len(a.steps) - len(only_a)
    return MetricsDifference(found, num_common, only_a.tolist(), only_b.tolist(), one_sided)


def _is_reproducible(name: str) -> bool:
    return name in REPRODUCIBLE or name.startswith(("loss/", "heldout_")) or is_of_layers(name)


def _rank(name: str) -> int:
    """The place of a metric among others: the most important ones come first, and the others stay as the files have them."""
    return REPRODUCIBLE.index(name) if name in REPRODUCIBLE else len(REPRODUCIBLE)


def _column(table: Table, name: str) -> Array:
    """The column. Lines have `skipped` only if it is true."""
    return np.nan_to_num(table.column(name)) if name == "skipped" else table.column(name)


def _compare(name: str, steps: Array, x: Array, y: Array) -> MetricDifference:
    differs = (x.view(np.uint64) != y.view(np.uint64)) & ~(np.isnan(x) & np.isnan(y))
    if not differs.any():
        return MetricDifference(name, len(steps), 0, None, np.nan, np.nan, 0.0, 0.0)
    at = int(differs.argmax())
    absolute, relative = np.abs(x - y)[differs], _relative(x[differs], y[differs])
    return MetricDifference(
        name, len(steps), int(differs.sum()), int(steps[at]), float(x[at]), float(y[at]),
        float(np.nanmax(absolute, initial=0.0)), float(np.nanmax(relative, initial=0.0)),
    )  # fmt: skip


def _relative(x: Array, y: Array) -> Array:
    larger = np.maximum(np.abs(x), np.abs(y))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(larger > 0, np.abs(x - y) / larger, np.where(np.isnan(larger), np.nan, 0.0))
    return found


def ranges_in_words(steps: Sequence[int], most: int = 4) -> str:
    """Growing steps as ranges: "1 to 50, 60"."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], step
        else:
            ranges.append((step, step))
    words = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in ranges[:most]]
    return ", ".join(words) + ", ..." * (len(ranges) > most)
