"""The layouts of `plan --compare`, and the arithmetic of its report. Without measurements."""

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mpitrain.job.record.machine.machine import load
from mpitrain.tools.plan.comparing.cases import layouts, name_of
from mpitrain.tools.plan.comparing.compare_report import tables
from mpitrain.tools.plan.comparing.results import (
    ComparisonLaunch,
    LayoutRow,
    excess_of_best,
    in_order,
    median_error,
    merged,
)
from mpitrain.tools.plan.layout import MPITRAIN
from mpitrain.tools.plan.measuring.small_gpt import GptSize, config_of
from mpitrain.tools.plan.price import price

ROWS = [
    LayoutRow("a", 1.0, 1.0, 0.9),
    LayoutRow("b", 1.1, 1.1, 1.0),
    LayoutRow("c", 0.9, 1.5, 1.4),
    LayoutRow("d", 3.0, 2.0, 1.9),
]


def test_layouts_cover_what_the_trainer_has() -> None:
    found = layouts(2, 8)
    assert len(found) == 22 and all(layout.ranks == 2 and layout.batch == 8 for layout in found.values())
    of = list(found.values())
    assert {one.zero for one in of if one.data > 1} == {0, 1, 2, 3}
    for zero in (1, 2, 3):
        assert {one.resident for one in of if one.zero == zero} == {True, False}
    assert {one.sequence for one in of if one.tensor > 1} == {True, False}
    assert {one.schedule for one in of if one.pipeline > 1} == {"gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"}
    assert {one.num_micro for one in of} == {1, 2, 4, 8}
    assert {one.recompute for one in of} == {"none", "block", "attention"}
    assert list(found) == [name_of(one) for one in of]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_trainer_has_settings_for_each_layout(ranks: int) -> None:
    size, machine = GptSize(layers=8, batch=16), load("h100")
    for layout in layouts(ranks, 16).values():
        config = config_of(size, layout, machine)
        assert config.train.accumulate == layout.num_micro
        assert config.parallel.checkpoint_activations == layout.recompute
        assert price(size.transformer, machine, MPITRAIN, layout).step_s > 0


@pytest.mark.parametrize(("ranks", "batch"), [(1, 8), (2, 4), (2, 9), (4, 8)])
def test_batches_that_micro_batches_do_not_divide(ranks: int, batch: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of {4 * ranks}, got {ranks} and {batch}"):
        layouts(ranks, batch)


def test_figures() -> None:
    # Ratios 1, 1, 0.6, 1.5.
    assert median_error(ROWS) == pytest.approx(0.2)
    # a and b are too close; c is predicted before a and b, though it takes longer; all are right about d.
    assert in_order(ROWS) == (3, 5)
    assert in_order(ROWS, apart=0.05) == (4, 6)
    assert excess_of_best(ROWS) == pytest.approx(0.5)
    assert in_order(ROWS[:1]) == (0, 0)


def launch(*rows: LayoutRow, threads: int = 1) -> ComparisonLaunch:
    return ComparisonLaunch({"cpu": "x"}, 2, 1, threads=threads, size="GPT", steps=3, load=0.5, rows=rows)


def test_launches_are_merged_by_medians() -> None:
    launches = [launch(LayoutRow("a", 1.0, seconds, seconds)) for seconds in (2.0, 9.0, 3.0)]
    assert merged(launches) == [LayoutRow("a", 1.0, 3.0, 2.0)]
    console = Console(width=150, file=StringIO())
    console.print(*tables([*launches, launch(*ROWS, threads=2)]), sep="\n")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "medians of 3 launches" in text and "medians of 3 steps" in text and "launch 2: median error 88.9%" in text
    assert "60% of 5 pairs more than 15% apart in order; the layout predicted as best takes 50.0% more" in text


@pytest.mark.rest
def test_files(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    launch(*ROWS).write(str(path))
    assert ComparisonLaunch.read(str(path)).rows == tuple(ROWS) or list(ComparisonLaunch.read(str(path)).rows) == ROWS
    command = [sys.executable, "-m", "mpitrain", "plan", "--compare-report", str(path), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "medians of 2 launches" in run.stdout, run.stderr
    path.write_text("{}")
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "is no file of `python -m mpitrain plan --compare MACHINE --json`" in run.stderr
