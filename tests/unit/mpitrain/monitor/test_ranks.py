"""Lines of ranks.jsonl."""

import numpy as np

from mpitrain.job.record.files.ranks import FIGURES, GAUGES, SUMMARY_FROM, line


def figures(num_ranks: int) -> np.ndarray:
    values = np.full((num_ranks, len(FIGURES)), 0.1234567)
    values[:, FIGURES.index("rows")] = 4
    values[:, 0] += np.arange(num_ranks)
    return values


def test_all_ranks_of_a_small_run() -> None:
    gauges = np.full((3, len(GAUGES)), np.nan)
    gauges[:, GAUGES.index("gpu_watts")] = 1.0, np.nan, 3.0
    entry = line(7, figures(3), gauges, is_new=True)
    assert entry["step"] == 7 and list(entry["ranks"]) == list(FIGURES)
    assert entry["ranks"]["step_s"] == [0.12346, 1.12346, 2.12346] and entry["ranks"]["rows"] == [4, 4, 4]
    assert list(entry["gauges"]) == ["gpu_watts"] and np.isnan(entry["gauges"]["gpu_watts"][1])


def test_a_large_run_has_a_summary_and_at_times_all_ranks() -> None:
    gauges = np.ones((SUMMARY_FROM, len(GAUGES)))
    entry = line(99, figures(SUMMARY_FROM), gauges, is_new=True)
    assert entry.keys() == {"step", "num_ranks", "summary"}
    assert entry["summary"]["step_s"] == [0.12346, 31.62346, 63.12346, 63]
    assert entry["summary"]["busy_s"] == [-0.12346, 31.37654, 62.87654, 63]
    assert line(100, figures(SUMMARY_FROM), gauges, is_new=False).keys() == {
        "step",
        "num_ranks",
        "summary",
        "ranks",
        "gauges",
    }
    small = line(99, figures(SUMMARY_FROM - 1), gauges[:-1], is_new=False)
    assert "ranks" in small and "gauges" not in small
