"""The data of a page: arrays in base64, each once, and in their places their numbers. base.js and panel.js decode them. Pure."""

import base64
import json
import zlib
from typing import Any

import numpy as np

from mpitrain.view.report.charts import Array, Axis, Cells, Chart, Panel, PanelFigure, RankSpread, colour_limits

EXACT_CELLS = 2000
"""A heat map of up to so many cells has them as floats; others as bytes between two limits."""
NONE = 255
"""The byte of a cell without a value."""


class Arrays:
    """The arrays of a page, as texts: a letter for the type, and base64."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[int, int] = {}  # of the arrays by id
        self._kept: list[Array] = []  # so that no id is used twice

    def add(self, values: Array, kind: str = "f") -> int:
        """The number of an array. Kinds: i int32; s float32; f the upper three bytes of float32 (5 digits); b bytes."""
        if id(values) not in self._numbers:
            self._numbers[id(values)] = len(self.texts)
            self._kept.append(values)
            self.texts.append(kind + base64.b64encode(_to_bytes(values, kind)).decode())
        return self._numbers[id(values)]


def _to_bytes(values: Array, kind: str) -> bytes:
    if kind == "b":
        return values.astype(np.uint8).tobytes()
    if kind == "i":
        return values.astype("<i4").tobytes()
    with np.errstate(over="ignore"):
        floats = values.astype("<f4")
    if kind == "s":
        return floats.tobytes()
    bits = floats.view("<u4").astype(np.uint64) + 0x80  # rounded; no carry goes beyond the bits of infinity
    bits = np.where(np.isfinite(floats), bits, 0x7FC00000).astype("<u4")
    return (
        bits.view(np.uint8).reshape(-1, 4)[:, 1:].T.tobytes()
    )  # all third bytes first: these are noise, and the others pack well


def pack(data: dict[str, Any]) -> str:
    """JSON, packed by zlib, in base64."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def chart_data(chart: Chart, arrays: Arrays) -> dict[str, Any]:
    """A chart for page.js."""
    return {
        "name": chart.name, "title": chart.title, "unit": chart.unit, "section": chart.section, "note": chart.note, "run": chart.run,
        "stacked": chart.is_stacked, "log": chart.is_log, "smooth": chart.is_smooth, "zero": chart.from_zero, "wide": chart.is_wide,
        "series": [
            {"label": each.label, "run": each.run, "colour": each.colour, **_axis(each.axis, arrays), "mean": arrays.add(each.mean)}
            | ({} if each.low is None or each.high is None else {"low": arrays.add(each.low), "high": arrays.add(each.high)})
            for each in chart.series
        ],
    }  # fmt: skip


def panel_data(panel: Panel, arrays: Arrays) -> dict[str, Any]:
    """A panel for page.js."""
    return {
        "name": panel.name, "title": panel.title, "note": panel.note, "run": panel.run, "word": panel.row_word, "rows": panel.rows,
        "figures": [_figure_data(figure, arrays) for figure in panel.figures],
    }  # fmt: skip


def _figure_data(figure: PanelFigure, arrays: Arrays) -> dict[str, Any]:
    data: dict[str, Any] = {"label": figure.label, "unit": figure.unit, "log": figure.is_log}
    if figure.cells is not None:
        data["cells"] = _cells_data(figure.cells, figure.is_log, arrays)
    # Of cells with all values the page makes the lines by itself.
    if figure.spread is not None and not (figure.cells is not None and _is_exact(figure.cells, figure.spread)):
        spread = figure.spread
        data["spread"] = _axis(spread.axis, arrays) | {
            name: arrays.add(getattr(spread, name)) for name in ("low", "median", "high", "worst")
        }
    else:
        data["lines"] = figure.spread is not None
    return data


def _is_exact(cells: Cells, spread: RankSpread) -> bool:
    return cells.values.size <= EXACT_CELLS and len(cells.axis.step) == len(spread.axis.step)


def _axis(axis: Axis, arrays: Arrays) -> dict[str, int]:
    return {"step": arrays.add(axis.step, "i"), "seconds": arrays.add(axis.seconds, "s")}


def _cells_data(cells: Cells, is_log: bool, arrays: Arrays) -> dict[str, Any]:
    values = cells.values
    low, high, is_clipped = colour_limits(values, is_log=is_log)
    if values.size <= EXACT_CELLS:
        return _axis(cells.axis, arrays) | {"data": arrays.add(values), "lo": low, "hi": high, "clipped": is_clipped}
    if is_log:
        position = np.log(np.where(values > 0, values, np.nan) / low) / (np.log(high / low) or 1.0)
    else:
        position = (values - low) / ((high - low) or 1.0)
    known = np.isfinite(position)
    data = np.full(values.shape, NONE, np.uint8)
    data[known] = np.round(np.clip(position[known], 0, 1) * 254)
    return _axis(cells.axis, arrays) | {"data": arrays.add(data, "b"), "lo": low, "hi": high, "clipped": is_clipped}
