"""`profile RUN`: what the record of a run tells."""

import json
from pathlib import Path

import pytest

from benchmarks.monitoring.recorded_runs import Slow, write_run
from mpitrain.cli import main
from mpitrain.job.config import Config
from mpitrain.job.record.files.events import write_event
from mpitrain.tools.profile import recorded as recorded_run
from mpitrain.view.reading.run import read_run

SETTINGS = """
run = "runs/a"
[model]
size = "small"
[parallel]
stage = 3
[train]
batch = 8
accumulate = 4
"""


def record(folder: Path, *, num_steps: int = 30, has_ranks: bool = True, **begun: int) -> Path:
    """Of a run whose rank 1 sleeps 0.3 s in each forward, so that rank 0 waits."""
    folder.mkdir()
    (folder / "config.toml").write_text(SETTINGS)
    own = {"forward_s": [0.3, 0.6], "backward_s": [0.4, 0.4], "comm_s": [0.4, 0.1], "optimizer_s": [0.05, 0.05],
           "data_s": [0.01, 0.01], "check_s": [0.0, 0.0], "step_s": [1.2, 1.2], "cpu_s": [0.8, 0.8],
           "delay_s": [0.0, 0.0], "rows": [4, 4]}  # fmt: skip
    steps, of_ranks = [], []
    for step in range(1, num_steps + 1):
        steps.append({"step": step, "time": 1e9 + step, "loss": 2.0, **{name: its[0] for name, its in own.items()}})
        of_ranks.append({"step": step, "ranks": own})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps) + '{"step": 31, "lo')
    if has_ranks:
        (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_ranks))
    write_event(
        folder, "begin", step=0, ranks=2, hosts=["node1", "node1"], device="cpu", flops_per_s=1e12, work=[[0, 9], [0, 9]],
        **begun,
    )  # fmt: skip
    write_event(
        folder, "straggler", rank=1, host="node1", step=25, cause="blocked", words="it sleeps (300 ms of a step)"
    )
    return folder


def test_after_a_recovery_the_ranks_are_those_that_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow(3, "cpu", 20, 300)
    before, after = (
        profile(capsys, str(write_run(tmp_path / f"{steps}", steps=steps, ranks=4, slow=slow, lost_after=200)))
        for steps in (200, 210)
    )
    assert "mean of 3 ranks" in after and "rank 2" in after and "rank 3" not in after
    assert "No rank waits" in after
    # Before the first step of the three, the last steps are those of four.
    assert "mean of 4 ranks" in before and "Slow rank 3" in before and "Ranks 0-2 wait" in before


def test_what_fits_is_judged_by_the_memory_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "so this host's was taken"
    assert told in profile(capsys, str(record(tmp_path / "old")))
    little, much = (
        profile(capsys, str(record(tmp_path / f"{size}", memory_bytes_of_rank=size))) for size in (10**9, 64 * 10**9)
    )
    assert told not in little + much
    assert "No other layout that fits the memory" in little and "--train.accumulate 1 (micro-batches of 4" in much


def test_the_settings_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts as they are, and not as they are shown, and without secrets."""
    folder = record(tmp_path / "a")
    text = SETTINGS.replace("[train]", f'[train]\nsample_prompt = "a\\tb{"x" * 200_000}"') + (
        '[data]\npath = ["a\\tb.jsonl", "https://u:p@h/a.jsonl"]\n[log]\non_event = "S3CRET"\n'
    )
    (folder / "config.toml").write_text(text)
    given: list[Config] = []
    advised = recorded_run.advised
    monkeypatch.setattr(recorded_run, "advised", lambda config, *words: given.append(config) or advised(config, *words))
    recorded_run.recorded(read_run(folder))
    (config,) = given
    assert config.data.path == ("a\tb.jsonl", "https://***@h/a.jsonl") and config.log.on_event is None
    assert config.train.sample_prompt.startswith("a\tbx") and len(config.train.sample_prompt) > 200_000


def profile(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["profile", *words]) == 0
    return capsys.readouterr().out


def test_the_slow_rank_its_cause_who_waits_and_what_to_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.svg"
    text = profile(capsys, str(record(tmp_path / "run")), "--svg", str(picture))
    assert "mpitrain profile" in (drawn := picture.read_text().replace("&#160;", " ")) and "url(http" not in drawn
    assert "own work ms" in drawn and "The cost model expects" in drawn
    assert "a step of 1,200.0 ms, mean of 2 ranks" in text and "all layers" in text
    assert "Slow rank 1, found 1 time, last at step 25: it sleeps (300 ms of a step)" in text
    assert "Rank 1 takes 1.37 times as long as the other ranks: it sleeps" in text
    assert "Rank 0 waits 300.0 ms a step (25%) for rank 1, whose time in all layers is 300.0 ms more, 1.4 times" in text
    assert "The cost model expects" in text and "error of" in text
    assert f"mpirun -np 2 python -m mpitrain profile --config {tmp_path}/run/config.toml --json" in text


def test_a_saved_profile_adds_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run")
    layer = {"parameters": 10**6, "gradients": 10**6, "optimizer": 10**6, "activations": 10**6}
    saved = {
        "parts": {"layers": {"blocks.0": {"forward": [0.5, 0.5]}, "blocks.1": {"forward": [0.1, 0.1]}}, "stages": [0, 0],
                  "num_steps": 5, "hidden": [0.0, 0.0], "cpu": [], "delay": []},
        "memory": [{"layers": {"blocks.0": layer}, "others": {"other": 10**6}, "peak": 5 * 10**6, "moment": "there"}] * 2,
    }  # fmt: skip
    (run / "profile.json").write_text(json.dumps(saved))
    text = profile(capsys, str(run))
    assert "profile.json: a step of 600.0 ms" in text and "blocks.0 (slowest)" in text and "at its peak of 5 MB" in text
    (run / "profile.json").write_text("{}")
    assert main(["profile", str(run)]) == 1
    assert "profile.json: expected the file of profile --json" in capsys.readouterr().err


def test_the_record_of_rank_0_alone_tells_no_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = profile(capsys, str(record(tmp_path / "run", has_ranks=False)))
    assert "Waits are not known" in text and "the figures are those of rank 0" in text and "for rank" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "expected the folder of a run"),
        (["empty"], "expected the record of at least one step"),
        (["run", "--machine", "h10"], "did you mean h100?"),
        (
            ["run", "--steps", "3"],
            "got --steps 3; --steps, --warm-up, --all, --json and settings belong to a profile under mpirun",
        ),
        (["run/config.toml"], "got a file"),
        (["run", "--svg", "run"], "expected a file name that ends in .svg, got run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run")
    record(tmp_path / "empty", num_steps=0)
    assert main(["profile", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("mpitrain: error: ") and said in err and err.count("\n") == 1
