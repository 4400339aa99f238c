"""The charts of steps: loss, speed, the split of a step, memory, and the figures of users."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.job.record.files.metrics import PARTS
from mpitrain.job.record.files.ranks import GAUGES
from mpitrain.view.reading.run import RunRecord
from mpitrain.view.report.charts import Array, Axis, Buckets, Chart, Series, scale
from mpitrain.view.report.time_axis import TimeAxis


class _Figure(NamedTuple):
    """A chart of figures that metrics.jsonl has under these names, with a label for each of several."""

    names: dict[str, str]
    title: str
    unit: str
    section: str
    note: str = ""
    is_log: bool = False
    is_smooth: bool = False
    from_zero: bool = False


_FIGURES = {
    "gradient-norm": _Figure(
        {"grad_norm": ""}, "Gradient norm", "", "Training", "before clipping", is_log=True, is_smooth=True
    ),
    "learning-rate": _Figure({"lr": ""}, "Learning rate", "", "Training"),
    "loss-scale": _Figure({"loss_scale": ""}, "Loss scale", "", "Training", is_log=True),
    "padding": _Figure({"padding": ""}, "Padding", "share", "Training", "tokens that only fill rows up", from_zero=True),
    "throughput": _Figure({"tokens_per_s": ""}, "Throughput", "tokens/s", "Speed", "all ranks", is_smooth=True, from_zero=True),
    "mfu": _Figure(
        {"mfu": "of the measured peak", "mfu_vendor": "of the data sheet's peak"},
        "Model FLOP utilisation", "share", "Speed", is_smooth=True, from_zero=True,
    ),
    "step-time": _Figure({"step_s": ""}, "Time of a step", "s", "Speed", is_smooth=True, from_zero=True),
    "communication": _Figure(
        {"comm_s": "exposed", "comm_hidden_s": "hidden", "check_s": "checks"},
        "Communication", "s", "Speed", "rank 0; exposed: with the wait for other ranks", is_smooth=True, from_zero=True,
    ),
    "memory": _Figure({"memory_bytes": ""}, "Memory", "B", "Memory", "rank 0", from_zero=True),
}  # fmt: skip
_COLOURS = {
    "computation": 0,
    "forward": 0,
    "backward": 1,
    "optimizer": 2,
    "communication": 3,
    "data": 4,
    "checks": 5,
    "rest": 6,
}
"""The parts from the lowest area to the highest."""
_NOT_OF_USERS = {
    "time",
    "skipped",
    "loss",
    *GAUGES,
    *PARTS,
    *(name for figure in _FIGURES.values() for name in figure.names),
}


def charts_of_steps(runs: Sequence[RunRecord], axes: Sequence[TimeAxis]) -> list[Chart]:
    """All charts of steps, those with values alone."""
    buckets = [Buckets(run.steps.step, axis.seconds) for run, axis in zip(runs, axes, strict=True)]
    charts = [_loss(runs, axes, buckets)]
    by_source = {name: name.removeprefix("loss/") for name in _names(runs) if name.startswith("loss/")}
    if by_source:
        figure = _Figure(by_source, "Loss by source", "nats per token", "Training", "of data", is_smooth=True)
        charts.append(_lines("loss-by-source", figure, runs, buckets))
    charts += [_lines(name, figure, runs, buckets) for name, figure in _FIGURES.items()]
    charts += [_split(number, run, of) for number, (run, of) in enumerate(zip(runs, buckets, strict=True))]
    charts += [_memory_kinds(number, run, axis) for number, (run, axis) in enumerate(zip(runs, axes, strict=True))]
    for name in _names(runs):
        if name not in _NOT_OF_USERS and name not in by_source:
            figure = _Figure({name: ""}, name, "", "Other metrics", is_smooth=True)
            charts.append(
                _lines("figure-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "x"), figure, runs, buckets)
            )
    known = [chart._replace(series=[each for each in chart.series if np.isfinite(each.mean).any()]) for chart in charts]
    return [chart for chart in known if chart.series]


def _names(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.steps.columns))


def _lines(name: str, figure: _Figure, runs: Sequence[RunRecord], buckets: Sequence[Buckets]) -> Chart:
    """A chart with a line for each run and each name of the figure."""
    found = [
        (number, label, run.steps.columns[key])
        for number, run in enumerate(runs)
        for key, label in figure.names.items()
        if key in run.steps.columns
    ]
    factor, unit = scale(figure.unit, [values for _, _, values in found])
    series = [buckets[number].series(label, number, values * factor) for number, label, values in found]
    is_log = figure.is_log and not any((each.mean <= 0).any() for each in series)
    return Chart(
        name, figure.title, unit, figure.section, series, figure.note,
        is_log=is_log, is_smooth=figure.is_smooth, from_zero=figure.from_zero,
    )  # fmt: skip


def _loss(runs: Sequence[RunRecord], axes: Sequence[TimeAxis], buckets: Sequence[Buckets]) -> Chart:
    series = [
        of.series("training", at, run.steps.column("loss"))
        for at, (run, of) in enumerate(zip(runs, buckets, strict=True))
    ]
    for number, (run, axis) in enumerate(zip(runs, axes, strict=True)):
        held_out = run.evaluations
        if len(held_out):
            places = Axis(held_out.step, axis.of_steps(held_out.step))
            series.append(Series("held-out", number, places, held_out.column("heldout_loss")))
    return Chart("loss", "Loss", "nats per token", "Training", series, is_smooth=True, is_wide=True)


def _split(number: int, run: RunRecord, buckets: Buckets) -> Chart:
    """The parts of a step. Old runs do not tell the parts of the computation apart."""
    step_s = run.steps.column("step_s")
    parts = {label: run.steps.columns[name] for name, label in PARTS.items() if name in run.steps.columns}
    # Of a step without a part the others are known: it took no time there.
    rest = step_s - sum((np.nan_to_num(values) for values in parts.values()), np.zeros(len(step_s)))
    parts["rest" if "forward" in parts else "computation"] = np.maximum(rest, 0.0)
    factor, unit = scale("s", [step_s])
    series = [
        Series(label, number, buckets.axis, buckets.mean(parts[label] * factor), colour=colour)
        for label, colour in _COLOURS.items()
        if label in parts
    ]
    return Chart(
        "step-split", "Where the time of a step goes", unit, "Speed", series, "rank 0, mean", run=number,
        is_stacked=True, from_zero=True,
    )  # fmt: skip


def _memory_kinds(number: int, run: RunRecord, axis: TimeAxis) -> Chart:
    """Memory by kind, of the rank that has the most at last."""
    kinds: dict[str, Array] = {
        name.removeprefix("memory/").removesuffix("_bytes"): values
        for name, values in run.gauges.columns.items()
        if name.startswith("memory/")
    }
    series, unit, note = [], "B", ""
    if kinds:
        total = sum((np.nan_to_num(values) for values in kinds.values()), np.zeros(1))
        rank = int(total[-1].argmax())
        buckets = Buckets(run.gauges.step, axis.of_steps(run.gauges.step))
        factor, unit = scale("B", [total[:, rank]])
        series = [
            Series(kind, number, buckets.axis, buckets.mean(values[:, rank].astype(np.float64) * factor), colour=colour)
            for colour, (kind, values) in enumerate(kinds.items())
        ]
        note = f"rank {rank}, which has the most"
    return Chart(
        "memory-kinds", "Memory by kind", unit, "Memory", series, note, run=number, is_stacked=True, from_zero=True
    )
