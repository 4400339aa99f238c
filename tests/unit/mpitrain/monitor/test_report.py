"""The report of a run: what stands out, what the charts show, and the command as users call it."""

import base64
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.monitoring.recorded_runs import Slow, write_run
from mpitrain.job.record.stragglers import CAUSES
from mpitrain.view.reading.run import read_run
from mpitrain.view.reading.tables import Table
from mpitrain.view.report.charts import Buckets, colour_limits
from mpitrain.view.report.document import PAGE
from mpitrain.view.report.encoding import Arrays
from mpitrain.view.report.findings import findings
from mpitrain.view.report.marks import MOST, describe, marks_of
from mpitrain.view.report.of_ranks import MOST_CELLS, panels_of_layers, panels_of_ranks
from mpitrain.view.report.of_steps import charts_of_steps
from mpitrain.view.report.pictures import draw
from mpitrain.view.report.report_command import main
from mpitrain.view.report.summary import at_a_glance, heading
from mpitrain.view.report.time_axis import TimeAxis

ROOT = Path(__file__).parents[4]
EVENTS = [
    {"event": "failure", "step": 80, "problem": "rank 1 was killed by signal 9"},
    {"event": "relaunch", "step": 80, "cost_s": 12.5},
    {"event": "rewind", "step": 90, "to_step": 85, "cost_s": 2.5, "why": "step 86: the loss is not finite"},
    {"event": "what is this", "step": 95, "why": 3},
    {"event": "trace", "step": 103, "first": 100, "last": 103, "path": "traces/a&b.json.gz"},
]


def told(folder: Path) -> str:
    return "\n".join(finding.text for finding in findings(read_run(folder)))


@pytest.mark.parametrize("cause", CAUSES)
def test_a_slow_rank_is_named_with_its_cause(tmp_path: Path, cause: str) -> None:
    found = findings(read_run(write_run(tmp_path / "a", steps=200, ranks=4, slow=Slow(2, cause, 50, 120))))
    (slow,) = [finding for finding in found if finding.weight == 2]
    assert (
        "Slow rank: rank 2 on node0 was 1.40 times as slow" in slow.text
        and "step 75" in slow.text
        and CAUSES[cause] in slow.text
    )
    assert slow.steps == (75, 75)


def test_what_stands_out(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "a", steps=300, ranks=4, skipped=[7, 8], spikes=[200], throttled=[3], gpu=True, data_share=0.1, events=EVENTS,
        settings={"optim": {"clip_norm": 0.3}},
    )  # fmt: skip
    text = told(folder)
    for expected in (
        "step 80: failure: rank 1 was killed by signal 9",
        "The run recovered: 1 relaunch, 1 rewind. This cost 15.0 s.",
        "1 spike of loss: step 200.",
        "Throttling: the GPU of rank 3 ran below its clock",
        "2 of 300 steps were skipped, because of loss or gradient: steps 7, 8.",
        "Data waits: 9.",
        "longer than optim.clip_norm = 0.3",
    ):
        assert expected in text
    weights = [finding.weight for finding in findings(read_run(folder))]
    assert weights == sorted(weights, reverse=True)


def test_nothing_stands_out_and_no_step(tmp_path: Path) -> None:
    text = told(write_run(tmp_path / "a", steps=100))
    assert "Nothing is wrong" in text and "communication" in text
    assert told(write_run(tmp_path / "b", steps=0)).endswith("\nThe run has no step yet.")


@pytest.mark.parametrize(
    ("events", "state", "is_told"),
    [
        ([{"event": "begin", "step": 0}], "no end recorded", True),
        ([{"event": "begin"}, {"event": "end", "reason": "stopped"}, {"event": "sink"}], "stopped", False),
        ([{"event": "begin"}, {"event": "end", "reason": "finished"}, {"event": "begin"}], "no end recorded", True),
        ([{"event": "begin"}, {"event": "failure", "problem": "x"}], "failed", False),
        ([{"event": "begin"}, {"event": "flipped_bit"}, {"event": "rewind"}], "no end recorded", True),
        ([], "", False),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, events: list[dict[str, Any]], state: str, is_told: bool) -> None:
    folder = write_run(tmp_path / "a", steps=30)
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert heading(read_run(folder)).startswith(f"30 of 30 steps{', ' * bool(state)}{state} ·")
    assert ("The record has no end: the run still goes on, or was killed." in told(folder)) == is_told


def test_a_loss_that_is_not_finite_at_the_end_has_no_number(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", steps=30, skipped=range(2, 31)))
    assert at_a_glance(run, TimeAxis(run))["loss, last 20 steps"] == "not finite"
    run = read_run(write_run(tmp_path / "b", steps=30, skipped=range(2, 30)))
    assert at_a_glance(run, TimeAxis(run))["loss, last 20 steps"] == f"{run.steps.column('loss')[-1]:.4f}"


@pytest.mark.parametrize("saves", [1, 2])
def test_the_save_at_the_end_is_no_advice(tmp_path: Path, saves: int) -> None:
    events = [{"event": "save", "step": 10, "path": "checkpoints/a", "cost_s": 2.0}] * saves
    text = told(write_run(tmp_path / "a", steps=30, events=events))
    assert ("Try a larger checkpoint.every" in text) == (saves > 1)


def test_slow_steps_and_a_rising_held_out_loss(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=50)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[29]["step_s"] = 3.0
    lines += [
        {"step": step, "heldout_loss": loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.4), (40, 2.5), (50, None))
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = told(folder)
    assert "1 of 47 steps took more than 2 times the median of" in text and "step 30. They cost 2." in text
    assert "best held-out loss is 2.0000, at step 20" in text or "best at step 20 (2.0000)" in text


def test_buckets_never_lose_a_spike() -> None:
    values = np.sin(np.arange(10_007) / 100)
    values[5003], values[7001], values[100:200] = 9.0, -9.0, np.nan
    buckets = Buckets(np.arange(1, 10_008), np.arange(10_007) / 10, points=300)
    series = buckets.series("x", 0, values)
    assert series.low is not None and series.high is not None and len(series.mean) <= 300
    assert np.nanmax(series.high) == 9.0 and np.nanmin(series.low) == -9.0
    assert series.axis.step[-1] == 10_007 and np.isnan(series.mean[3:5]).all()  # 34 steps in each
    known = np.isfinite(series.mean)
    assert (series.low[known] <= series.mean[known]).all() and (series.mean[known] <= series.high[known]).all()
    assert np.nanargmax(buckets.at_high(np.arange(10_007.0), of=values) == 5003) == 5003 // 34


def decode(text: str) -> np.ndarray:
    """As base.js does."""
    raw = np.frombuffer(base64.b64decode(text[1:]), np.uint8)
    if text[0] == "f":
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = raw.reshape(3, -1).T
        return wide.view("<f4")[:, 0]
    return raw.view({"i": "<i4", "s": "<f4", "b": "u1"}[text[0]])


def test_encoded_floats_have_five_digits() -> None:
    values = np.array([0.0, 1.0, -2.34567, 1e-30, 3e38, 123456.0, np.nan, np.inf, 1e300])
    arrays = Arrays()
    assert arrays.add(values) == arrays.add(values) == 0 and arrays.add(np.arange(3), "i") == 1
    found = decode(arrays.texts[0])
    np.testing.assert_allclose(found[:6], values[:6], rtol=2.0**-16)
    assert np.isnan(found[6:]).all() and decode(arrays.texts[1]).tolist() == [0, 1, 2]


def test_marks(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", steps=1000, skipped=range(1, 1000), save_every=500, events=EVENTS))
    marks = marks_of(run, TimeAxis(run))
    assert sum(mark.group == "spike or skip" for mark in marks) <= MOST
    by_group = {mark.group: mark for mark in marks}
    assert by_group["failure"].text == "step 80: failure: rank 1 was killed by signal 9"
    assert (
        by_group["checkpoint"].step == 1000
        and "saved checkpoints/step-00001000 (0.02 s)" in by_group["checkpoint"].text
    )
    assert [mark.seconds for mark in marks] == sorted(mark.seconds for mark in marks)
    assert "step 95: what is this: why 3" in [describe(event) for event in run.events]


def test_charts_and_panels(tmp_path: Path) -> None:
    run = read_run(
        write_run(
            tmp_path / "a",
            steps=90,
            ranks=3,
            sources=["web", "code"],
            layers_every=30,
            gpu=True,
            figures={"my/figure": 2.0},
        )
    )
    charts = {chart.name: chart for chart in charts_of_steps([run], [TimeAxis(run)])}
    assert (
        charts["throughput"].unit == "k tokens/s"
        and charts["step-split"].unit == "ms"
        and charts["memory"].unit == "MB"
    )
    assert [series.label for series in charts["loss-by-source"].series] == ["web", "code"]
    assert [series.label for series in charts["mfu"].series] == ["of the measured peak", "of the data sheet's peak"]
    assert charts["figure-my-figure"].section == "Other metrics"
    total = sum(series.mean for series in charts["step-split"].series)
    np.testing.assert_allclose(total, 1e3 * run.steps.column("step_s"), rtol=1e-6)
    assert charts["memory-kinds"].note == "rank 2, which has the most"
    (ranks,), (layers,) = panels_of_ranks([run], [TimeAxis(run)]), panels_of_layers([run], [TimeAxis(run)])
    busy = ranks.figures[0]
    assert busy.name == "busy_s" and busy.cells is not None and busy.cells.values.shape == (90, 3)
    expected = run.ranks.columns["step_s"] - run.ranks.columns["comm_s"] - run.ranks.columns["check_s"]
    np.testing.assert_allclose(busy.cells.values, 1e3 * expected)
    assert layers.rows == ["embedding", "blocks.0", "blocks.1", "head"] and len(layers.figures) == 4


def run_command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as a process, which also tells the modules that it has imported."""
    script = "import sys; from mpitrain.cli import main; code = main(); print(sorted(sys.modules)); sys.exit(code)"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, "report", *map(str, words)],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="text/plain">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def test_the_command_imports_neither_torch_nor_mpi(tmp_path: Path) -> None:
    result = run_command(write_run(tmp_path / "a", steps=60, events=EVENTS), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "'msgspec'" in result.stdout
    for module in ("torch", "mpi4py.MPI", "h5py", "matplotlib"):
        assert f"'{module}'" not in result.stdout
    page = tmp_path / "a" / "report.html"
    assert page.stat().st_size < 100_000
    text = page.read_text()
    assert "Permission is hereby granted" in text and "Leon Sorokin" in text
    assert 'href="traces/a%26b.json.gz"' in text
    assert not re.search(r"(src|href)=.?https?:", text)


def test_a_folder_of_no_run_is_one_line(tmp_path: Path) -> None:
    result = run_command(tmp_path, cwd=tmp_path)
    assert result.returncode == 1
    assert re.fullmatch(
        r"mpitrain: error: .*expected the folder of a run.*got a folder without them; give the folder.*\n",
        result.stderr,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "--out", "RUN"], "--out: RUN is a folder; expected a file"),
        (["RUN", "--out", "RUN/config.toml/a.html"], "--out: RUN/config.toml is a file; expected a folder"),
        (["RUN", "--out", "/proc/a.html"], "--out: /proc/a.html cannot be written: No such file or directory"),
        (["RUN", "--png", "RUN/config.toml"], "--png: RUN/config.toml is a file; expected a folder"),
        (["RUN/config.toml"], r"RUN/config.toml: expected the folder of a run, .*, got a file; give the folder that --run named.*"),
    ],
)  # fmt: skip
def test_wrong_files_are_named_with_their_option(tmp_path: Path, words: list[str], said: str) -> None:
    write_run(tmp_path, steps=2)
    with pytest.raises((ValueError, OSError)) as error:
        main([word.replace("RUN", str(tmp_path)) for word in words])
    assert re.fullmatch(said.replace("RUN", str(tmp_path)), str(error.value))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": 1, "ranks": 1},
        {"steps": 30, "skipped": range(1, 31), "torn": True},
        {"steps": 20, "is_old": True},
    ],
)
def test_odd_runs_have_a_page(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "a", **options)
    assert main([str(folder)]) == 0
    data = data_of(folder / "report.html")
    assert bool(data["charts"]) == bool(options["steps"])


@pytest.mark.rest
@pytest.mark.parametrize(("ranks", "steps", "most_bytes"), [(2, 10_000, 400_000), (1024, 300, 250_000)])
def test_a_page_of_many_steps_or_ranks_is_small(tmp_path: Path, ranks: int, steps: int, most_bytes: int) -> None:
    folder = write_run(tmp_path / "a", steps=steps, ranks=ranks)
    assert main([str(folder)]) == 0
    assert (folder / "report.html").stat().st_size <= most_bytes


def test_a_lost_rank_has_gaps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", steps=300, ranks=4, lost_after=200, slow=Slow(3, "cpu", 1, 200)))
    (panel,) = panels_of_ranks([run], [TimeAxis(run)])
    (busy,) = [figure for figure in panel.figures if figure.name == "busy_s"]
    assert busy.cells is not None and busy.spread is not None
    has_gap = np.isnan(busy.cells.values[busy.cells.axis.step > 200])
    assert not has_gap[:, :3].any() and has_gap[1:, 3].all()
    assert np.isfinite(busy.spread.high).all() and busy.spread.worst[0] == 3 and busy.spread.worst[-1] < 3


def test_heat_maps_of_many_ranks_are_small_and_show_the_odd_one(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", steps=4, ranks=2))
    values = np.random.default_rng(0).normal(1.0, 0.01, (300, 3000)).astype(np.float32)
    values[:, 1234] = 1.4
    run = run._replace(ranks=Table(np.arange(1, 301) * 100, {"backward_s": values}))
    (panel,) = panels_of_ranks([run], [TimeAxis(run)])
    assert panel.rows[411] == "1233–1235" and len(panel.rows) == 1000
    (cells,) = [figure.cells for figure in panel.figures if figure.name == "backward_s"]
    assert cells is not None and cells.values.size <= MOST_CELLS and cells.axis.step[-1] == 30_000
    assert (cells.values.argmax(axis=1) == 411).all()
    low, high, _ = colour_limits(cells.values, is_log=False)
    assert low < 1.0 and high > 1.3


def test_several_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a <b>", steps=50)
    write_run(tmp_path / "b", steps=40, seed=1, settings={"optim": {"lr": 0.001}})
    assert main(["a <b>", "b"]) == 0
    text = (tmp_path / "report.html").read_text()
    differences = re.search(r"<h3>Differences</h3>(.*?)</div>", text)
    assert differences is not None
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", differences[1])
    assert rows == [("optim.lr", "0.003", "0.001"), ("train.steps", "50", "40")]
    assert "a &lt;b&gt;" in text and "a <b>" not in text
    data = data_of(tmp_path / "report.html")
    assert [series["run"] for series in data["charts"][0]["series"]] == [0, 1]


@pytest.mark.rest
def test_images_for_papers(tmp_path: Path) -> None:
    """All images of an old run, which has few, and a heat map."""
    image = pytest.importorskip("PIL.Image")
    folder = write_run(tmp_path / "old", steps=40, evaluate_every=20, is_old=True)
    assert main([str(folder), "--png", str(tmp_path / "images")]) == 0
    run = read_run(write_run(tmp_path / "new", steps=40))
    (panel,) = panels_of_ranks([run], [TimeAxis(run)])
    draw(tmp_path / "images", [run], [], [panel._replace(figures=panel.figures[:1])])
    names = {path.stem for path in (tmp_path / "images").iterdir()}
    assert {"loss", "step-split", "ranks-busy-s"} <= names
    for name in ("loss", "ranks-busy-s"):
        with image.open(tmp_path / "images" / f"{name}.png") as drawn:
            assert drawn.width > 1200 and len(drawn.convert("RGB").getcolors(1 << 20)) > 10


def test_images_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = write_run(tmp_path / "a", steps=2)
    with pytest.raises(ValueError, match=r"--png needs matplotlib: pip install 'mpitrain\[plot\]'"):
        main([str(folder), "--png", str(tmp_path / "images")])
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("theme", [":root{", ":root.dark{"])
def test_colours_have_contrast(theme: str) -> None:
    """At least 4.5 to 1 for texts, and 3 to 1 for lines and marks, on the backgrounds: WCAG 2.2, AA."""
    css = (PAGE / "page.css").read_text()
    block = css[css.index(theme) : css.index("}", css.index(theme))]
    light = {name: luminance(value) for name, value in re.findall(r"--([\w-]+):#(\w+)", block)}
    texts, lines = ("fg", "dim", "focus", "m-failure", "m-spike"), [name for name in light if re.match(r"c\d|m-", name)]
    assert len(lines) == 14
    for name in (*texts, *lines):
        for ground in ("card", "bg"):
            ratio = (max(light[name], light[ground]) + 0.05) / (min(light[name], light[ground]) + 0.05)
            assert ratio >= (4.5 if name in texts else 3.0), (name, ground, ratio)


def luminance(colour: str) -> float:
    """Relative luminance of rgb or rrggbb, as WCAG defines it."""
    digits = "".join(2 * digit for digit in colour) if len(colour) == 3 else colour
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
