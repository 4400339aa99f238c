"""The figures of each rank in one step: a line of `ranks.jsonl`. Pure."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

FIGURES = (
    "step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "comm_hidden_s", "check_s", "cpu_s", "delay_s",
    "rows", "memory_bytes", "network_bytes",
)  # fmt: skip
"""Of each rank in each step. Four are not in metrics.jsonl. `cpu_s`: the CPU time of the main thread. `delay_s`: the time in
which it was ready to run and had no core. `rows`: the rank's sequences of the global batch, with those that a round of slices repeats,
because they take time. `network_bytes`: sent to other nodes."""
_NUM_SECONDS = FIGURES.index("rows")

GAUGES = (
    "memory/parameters_bytes", "memory/gradients_bytes", "memory/optimizer_bytes", "memory/shared_bytes", "memory/other_bytes",
    "cpu_percent", "net_sent_bytes_per_s", "net_received_bytes_per_s", "gpu_percent", "gpu_watts", "gpu_celsius", "gpu_throttled",
)  # fmt: skip
"""Of each rank every few seconds: see gauges/."""

SUMMARY_FROM = 64
"""From so many ranks on a line has a summary in place of all ranks' figures,"""
ALL_EVERY = 100
"""but in steps that are a multiple of this."""


_Seconds = TypeVar("_Seconds", float, np.ndarray)


def busy_s(step_s: _Seconds, comm_s: _Seconds, check_s: _Seconds) -> _Seconds:
    """The seconds of a step in which a rank does not wait for others: of one rank, or of many. Slow ranks are found by it."""
    return step_s - comm_s - check_s


def line(step: int, figures: np.ndarray, gauges: np.ndarray, *, is_new: bool) -> dict[str, Any]:
    """The line of a step. figures: (ranks, FIGURES) float64. gauges: (ranks, GAUGES) float64, NaN where a rank has none.

    is_new: the gauges were sampled in this step. Lines of many ranks have the last sample, because few steps have a line for it.
    """
    figures = figures.copy()
    figures[:, :_NUM_SECONDS] = figures[:, :_NUM_SECONDS].round(5)
    columns = dict(zip(FIGURES, figures.T, strict=True))
    entry: dict[str, Any] = {"step": step}
    is_large = len(figures) >= SUMMARY_FROM
    if is_large:
        busy = busy_s(columns["step_s"], columns["comm_s"], columns["check_s"]).round(5)
        in_short = {**columns, "busy_s": busy}.items()
        entry |= {"num_ranks": len(figures), "summary": {name: _summary(its) for name, its in in_short}}
        if step % ALL_EVERY:
            return entry
    entry["ranks"] = {name: _numbers(name, its) for name, its in columns.items()}
    if is_new or is_large:
        known = {name: its for name, its in zip(GAUGES, gauges.T, strict=True) if not np.isnan(its).all()}
        entry["gauges"] = {name: its.round(3).tolist() for name, its in known.items()}
    return entry


def _summary(column: np.ndarray) -> list[float]:
    """Minimum, median, maximum, and the rank with the maximum."""
    return [float(column.min()), round(float(np.median(column)), 5), float(column.max()), int(column.argmax())]


def _numbers(name: str, column: np.ndarray) -> Sequence[float]:
    return column.astype(np.int64).tolist() if FIGURES.index(name) >= _NUM_SECONDS else column.tolist()
