"""What `python -m mpitrain bench` makes of its arguments and figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from mpitrain import cli
from mpitrain.tools.bench import bench_report
from mpitrain.tools.bench.memory import PssSampler, pss, state_bytes
from mpitrain.tools.bench.options import parse
from mpitrain.tools.bench.plot import plot
from mpitrain.tools.bench.results import BenchCase, HookOverhead, MeasuredCase, Phases, StepRow, TrainingLaunch
from mpitrain.tools.bench.timing import phases

CASE = BenchCase(width=64, layers=2, heads=2, context=16, batch=1)


# Arguments


def test_arguments() -> None:
    options = parse([])
    assert options.contestants == ["mpitrain", "none", "ddp", "fsdp"]
    assert options.cases == [BenchCase(width=1024, layers=8, heads=8, context=128, batch=1)]
    options = parse(["--shapes", "64x2x1, 32x1x3", "--heads", "4", "--context", "8", "--peers", ""])
    assert options.contestants == ["mpitrain"]
    assert [(c.width, c.layers, c.heads, c.context, c.batch) for c in options.cases] == [
        (64, 2, 4, 8, 1),
        (32, 1, 4, 8, 3),
    ]
    assert parse(["--only", "fsdp"]).contestants == ["fsdp"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "64x2"], "'64x2'; expected width x layers x batch, such as 1024x8x1,512x6x4"),
        (["--shapes", "64x0x1"], "'64x0x1'; expected width"),
        (["--steps", "0"], "'0'; expected a whole number of at least 1"),
        (["--peers", "none,horovod"], "invalid choice: 'horovod'; expected of none, ddp, fsdp, deepspeed, tensor"),
        (["--only", "fsdp", "--peers", "ddp"], "argument --peers: not allowed with argument --only"),
        (["--only", "fsdp", "--shapes", "64x2x1,32x2x1"], "--only measures the peak memory of the process"),
        (["--heads", "3"], "model.width: expected a multiple of model.heads = 3, got 1024"),
        (["--batches", "3"], "unrecognized arguments: --batches 3"),
    ],
)
def test_wrong_arguments(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r"^bench: ") as error:
        parse(words)
    assert message in str(error.value)


# Figures of a step


def test_phases_are_medians_of_the_mean_and_other_is_the_rest_up_to_the_slowest() -> None:
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5, "forward comm": 0.25, "backward comm": 0.5}
    means = {part: np.array([seconds, seconds, 9.0]) for part, seconds in parts.items()}
    slowest = np.array([4.5, 4.5, 90.0])
    assert phases(means, slowest, knows_communication=True) == Phases(0.75, 1.5, 0.75, 0.5, 1.0)
    silent = {**means, "forward comm": np.zeros(3), "backward comm": np.zeros(3)}
    assert phases(silent, slowest, knows_communication=False) == Phases(1.0, 2.0, None, 0.5, 1.0)


def test_state_counts_memory_once() -> None:
    weight = torch.zeros(10)
    assert state_bytes([weight, weight, weight.data, torch.zeros(5), torch.zeros(5)]) == 40 + 20 + 20


def test_a_peak_between_two_looks_at_memory_is_seen_by_the_sampler() -> None:
    now = pss()
    assert now is not None and now > 1 << 20
    values = [1, 7, 3]
    with PssSampler(lambda: values.pop(0) if values else None) as sampler:
        sampler._thread.join(5)
    assert sampler.peak == 7
    with PssSampler(lambda: None) as sampler:
        pass
    assert sampler.peak is None


# Files and reports


def row(name: str, step_s: float, **options: Any) -> StepRow:
    parts = Phases(0.2 * step_s, 0.4 * step_s, 0.1 * step_s if name == "mpitrain" else None, 0.2 * step_s, 0.1 * step_s)
    return StepRow(name, step_s, 0.9 * step_s, 2 * step_s, parts, 16 / step_s, 0.25, 5.5, 12_345_678, **options)


def launch(*rows: StepRow, **options: Any) -> TrainingLaunch:
    measured = [MeasuredCase(CASE, rows, {"deepspeed": "it is not installed"})] if rows else []
    settings: dict[str, Any] = {
        "machine": {"cpu": "A"}, "ranks": 2, "nodes": 1, "threads": 1, "device": "cpu", "dtype": "float32", "steps": 8,
    }  # fmt: skip
    return TrainingLaunch(**{**settings, "measured": measured, **options})


def text_of(launches: list[TrainingLaunch]) -> str:
    console = Console(width=240, highlight=False, force_terminal=False)
    with console.capture() as capture:
        console.print(*bench_report.tables(launches), sep="\n")
    return capture.get()


def test_a_launch_comes_back_from_its_file(tmp_path: Path) -> None:
    file = str(tmp_path / "a.json")
    for made in (
        launch(row("mpitrain", 1.0, peak_rss_bytes=7), row("ddp", 2)),
        launch(overhead=HookOverhead(200, 2, 1, 4, 3)),
    ):
        made.write(file)
        assert bench_report.merged([TrainingLaunch.read(file)], CASE) == bench_report.merged([made], CASE)
        assert TrainingLaunch.read(file).overhead == made.overhead


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: [],
        lambda data: {**data, "format": 99},
        lambda data: {name: value for name, value in data.items() if name != "ranks"},
        lambda data: {**data, "measured": [{**data["measured"][0], "rows": [{"name": "ddp"}]}]},
        lambda data: {
            **data,
            "measured": [{**data["measured"][0], "case": {**data["measured"][0]["case"], "width": "w"}}],
        },
        lambda data: {**data, "overhead": 5},
    ],
)
def test_another_file_is_refused_by_name(
    tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    launch(row("mpitrain", 1.0)).write(str(file))
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=r"a\.json is no file of `python -m mpitrain bench --json`: "):
        TrainingLaunch.read(str(file))
    monkeypatch.setattr("collectives.launched_rank", lambda: -1)
    assert cli.main(["bench", "--report", str(file)]) == 1
    assert "mpitrain: error: " in capsys.readouterr().err


def test_a_report_gives_medians_of_ratios_within_each_launch_and_memory_of_those_alone() -> None:
    # one launch was disturbed by as much for all: the ratios do not show it
    together = [launch(row("mpitrain", s), row("fsdp", 4 * s)) for s in (1.0, 1.1, 50.0)]
    alone = [
        launch(row("fsdp", 0.001, peak_rss_bytes=r, peak_pss_bytes=r // 2, added_pss_bytes=1)) for r in (4, 6, 100)
    ]
    merged = {one.name: one for one in bench_report.merged([*alone, *together], CASE)}
    assert list(merged) == ["mpitrain", "fsdp"]
    assert (merged["mpitrain"].step_s, merged["fsdp"].step_s) == (1.1, 4.4)
    assert (merged["fsdp"].fastest_s, merged["fsdp"].slowest_s) == (0.9 * 4, 2 * 4 * 50)
    assert (merged["fsdp"].peak_rss_bytes, merged["fsdp"].peak_pss_bytes) == (6, 3)
    assert merged["mpitrain"].peak_rss_bytes is None
    assert merged["mpitrain"].phases.comm_s == pytest.approx(0.11) and merged["fsdp"].phases.comm_s is None
    assert bench_report.ratio([*alone, *together], CASE, "fsdp") == 0.25
    assert bench_report.ratio([*alone, *together], CASE, "ddp") is None
    assert bench_report.merged(alone, CASE)[0].step_s == 0.001, "of one alone where there is nothing else"


def test_the_tables() -> None:
    over = [launch(overhead=HookOverhead(200, s, 1e-2, 2 * s, 1e-2)) for s in (0.01, 0.012, 0.5)]
    launches = [launch(row("mpitrain", 0.05), row("ddp", 0.1)), launch(row("mpitrain", 1.0), row("ddp", 2.0)), *over]
    text = text_of([*launches, launch(row("mpitrain", 1.0), ranks=4)])
    assert "2 ranks x 1 thread on 1 node, A, float32\n" in text and "4 ranks x 1 thread on 1 node" in text
    assert "0.1 M parameters (64 x 2), batch 1 x 16 a rank, medians of 2 launches" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.endswith("comm optimizer other tokens/s MFU state MB") for line in lines), (
        "and no peak: none was measured"
    )
    assert "mpitrain 525 45.0 .. 2,000 1.00 105 210 52.5 105 52.5 168 25% 12" in lines
    assert "ddp 1,050 90.0 .. 4,000 0.50 210 420 210 105 84 25% 12" in lines
    assert text.count("skipped deepspeed: it is not installed") == 2
    assert "forward and backward 1.20 times the plain model's (10 us more a unit), the whole step 2.40 times" in text


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    other = replace(CASE, width=32)
    rows = [row("mpitrain", 1.0), row("none", 0.9)]
    plot(str(file), [launch(measured=[MeasuredCase(CASE, rows), MeasuredCase(other, rows)])])
    assert file.read_bytes().startswith(b"\x89PNG")
