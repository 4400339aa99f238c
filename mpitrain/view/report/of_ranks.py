"""The panels of ranks and of layers: which rank waits or is slow, and how the layers differ."""

from collections.abc import Sequence

import numpy as np

from mpitrain.job.record.files.ranks import busy_s
from mpitrain.view.reading.run import LAYER_KINDS, RunRecord
from mpitrain.view.reading.tables import Table
from mpitrain.view.report.charts import Array, Buckets, Cells, Panel, PanelFigure, RankSpread, scale
from mpitrain.view.report.time_axis import TimeAxis

MOST_CELLS = 75_000
"""Of one heat map: 1,024 ranks have 73 columns."""
MOST_COLUMNS = 400
MOST_ROWS = 1024
"""Of more ranks a row shows some neighbours, by the one that differs most from the median rank."""
SPREAD_POINTS = 600

_FIGURES = {
    "busy_s": ("busy: the step without waits for others", "s"),
    "comm_s": ("communication and waits for other ranks", "s"),
    "data_s": ("wait for data", "s"),
    "delay_s": ("ready to run, but without a core", "s"),
    "cpu_s": ("CPU time", "s"),
    "forward_s": ("forward", "s"),
    "backward_s": ("backward", "s"),
    "optimizer_s": ("optimizer", "s"),
    "comm_hidden_s": ("hidden communication", "s"),
    "check_s": ("checks", "s"),
    "step_s": ("step", "s"),
    "rows": ("rows of the batch", ""),
    "memory_bytes": ("memory", "B"),
    "cpu_percent": ("CPU use", "%"),
    "net_sent_bytes_per_s": ("network of the node, sent", "B/s"),
    "net_received_bytes_per_s": ("network of the node, received", "B/s"),
    "gpu_percent": ("GPU use", "%"),
    "gpu_watts": ("GPU power", "W"),
    "gpu_celsius": ("GPU temperature", "°C"),
    "gpu_throttled": ("GPU throttled", ""),
}
_LAYER_LABELS = {
    "grad_norm": "gradient norm",
    "param_norm": "parameter norm",
    "update_ratio": "update ratio",
    "zeros": "share of zeros in the gradient",
}


def panels_of_ranks(runs: Sequence[RunRecord], axes: Sequence[TimeAxis]) -> list[Panel]:
    """A panel for each run that has figures of at least two ranks."""
    panels = []
    for number, (run, axis) in enumerate(zip(runs, axes, strict=True)):
        grids = _Grids(axis)
        figures = [
            figure
            for name, (label, kind) in _FIGURES.items()
            if (figure := _figure(name, label, kind, run, grids)) is not None
        ]
        num_rows = max((values.shape[1] for values in (run.ranks.columns | run.gauges.columns).values()), default=0)
        if num_rows < 2 and not len(run.summaries):
            continue
        each = "; all ranks every 100th step" if len(run.summaries) else ""
        panels.append(
            Panel(
                "ranks",
                "Ranks",
                f"lines: least, median and largest of the ranks{each}",
                number,
                "rank",
                _rows(num_rows),
                figures,
            )
        )
    return panels


def panels_of_layers(runs: Sequence[RunRecord], axes: Sequence[TimeAxis]) -> list[Panel]:
    """A panel for each run that has figures of layers."""
    panels = []
    for number, (run, axis) in enumerate(zip(runs, axes, strict=True)):
        layers = list(dict.fromkeys(name.partition("/")[2] for name in run.layers.columns if "/" in name))
        grids, figures = _Grids(axis), []
        for kind in LAYER_KINDS:
            if not any(f"{kind}/{layer}" in run.layers.columns for layer in layers):
                continue
            values = np.stack([run.layers.column(f"{kind}/{layer}") for layer in layers], axis=1)
            factor, unit = scale("share", []) if kind == "zeros" else (1.0, "")
            cells = _cells(run.layers, values * factor, grids)
            figures.append(PanelFigure(kind, _LAYER_LABELS[kind], unit, cells, None, is_log=kind != "zeros"))
        if figures:
            panels.append(
                Panel("layers", "Layers", "on the steps of log.layers_every", number, "layer", layers, figures)
            )
    return panels


class _Grids:
    """The buckets of a run's tables, each made once, so that the page has each axis once."""

    def __init__(self, axis: TimeAxis) -> None:
        self._axis = axis
        self._made: dict[tuple[int, int], Buckets] = {}

    def buckets(self, table: Table, points: int) -> Buckets:
        key = id(table.step), points
        if key not in self._made:
            self._made[key] = Buckets(table.step, self._axis.of_steps(table.step), points)
        return self._made[key]


def _rows(num_ranks: int) -> list[str]:
    size = _group(num_ranks)
    if size == 1:
        return [str(rank) for rank in range(num_ranks)]
    return [f"{rank}–{min(rank + size, num_ranks) - 1}" for rank in range(0, num_ranks, size)]


def _group(num_ranks: int) -> int:
    return max(-(-num_ranks // MOST_ROWS), 1)


def _figure(name: str, label: str, kind: str, run: RunRecord, grids: _Grids) -> PanelFigure | None:
    """None if no rank has a value."""
    table = run.gauges if name in run.gauges.columns else run.ranks
    values = _busy(run.ranks) if name == "busy_s" else table.columns.get(name)
    summary = run.summaries.columns.get(name)
    known = [each for each in (values, summary) if each is not None and np.isfinite(each).any()]
    if not known or (kind == "" and all(np.nanmin(each) == np.nanmax(each) for each in known)):
        return None
    factor, unit = scale(kind, [known[0].ravel()[:100_000]])
    cells = None if values is None or not np.isfinite(values).any() else _cells(table, values * factor, grids)
    if summary is not None and summary.shape[1] == 4:
        low, median, high, worst = (summary * [factor, factor, factor, 1]).T
        spread = _spread(run.summaries, low, median, high, worst, grids)
    elif values is not None and values.shape[1] > 1 and not len(run.summaries):
        spread = _spread(table, *_order(values * factor), grids)
    else:
        spread = None
    return PanelFigure(name, label, unit, cells, spread)


def _busy(ranks: Table) -> Array | None:
    if "step_s" not in ranks.columns or "comm_s" not in ranks.columns:
        return None
    check_s = np.nan_to_num(ranks.columns.get("check_s", np.zeros(1)))
    return busy_s(ranks.columns["step_s"], ranks.columns["comm_s"], check_s)


def _order(values: Array) -> tuple[Array, Array, Array, Array]:
    """The least, the median and the largest of each row, and the place of the largest."""
    known = np.isfinite(values).any(axis=1)
    low, median, high, worst = np.full((4, len(values)), np.nan)
    of = values[known]
    low[known], high[known] = np.nanmin(of, axis=1), np.nanmax(of, axis=1)
    median[known] = np.median(of, axis=1) if np.isfinite(of).all() else np.nanmedian(of, axis=1)
    worst[known] = np.nanargmax(of, axis=1)
    return low, median, high, worst


def _spread(table: Table, low: Array, median: Array, high: Array, worst: Array, grids: _Grids) -> RankSpread:
    buckets = grids.buckets(table, SPREAD_POINTS)
    return RankSpread(
        buckets.axis, buckets.low(low), buckets.mean(median), buckets.high(high), buckets.at_high(worst, of=high)
    )


def _cells(table: Table, values: Array, grids: _Grids) -> Cells:
    num_rows = values.shape[1]
    if (size := _group(num_rows)) > 1:
        values = _most_unusual(values, size)
    columns = max(1, min(MOST_COLUMNS, MOST_CELLS // values.shape[1]))
    buckets = grids.buckets(table, columns)
    return Cells(buckets.axis, buckets.mean(values))


def _most_unusual(values: Array, size: int) -> Array:
    """Of each `size` neighbours the one that differs most from the median of all."""
    missing = -values.shape[1] % size
    padded = np.pad(values, ((0, 0), (0, missing)), constant_values=np.nan).reshape(len(values), -1, size)
    distance = np.nan_to_num(np.abs(padded - np.nanmedian(values, axis=1)[:, None, None]), nan=-1.0)
    found: Array = np.take_along_axis(padded, distance.argmax(axis=2)[..., None], axis=2)[..., 0]
    return found
