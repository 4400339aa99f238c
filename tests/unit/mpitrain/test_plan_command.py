"""`python -m mpitrain plan`, and the files of machines."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.job.config import from_toml
from mpitrain.job.record.machine.machine import from_text, load, names
from mpitrain.tools.plan import plan_command

SMALL = ["--model", "llama3-8b", "--ranks", "16", "--machine", "h100", "--batch", "64"]
TEXT = """
name = "x"
flops = 1e12
memory = 1e9
memory_bandwidth = 1e10
ranks_per_node = 4
node_bandwidth = 1e10
bandwidth = 1e9
node_latency_s = 1e-6
latency_s = 1e-5
launch_s = 1e-6
[efficiency]
product = 0.8
attention = 0.5
stream = 0.8
node_link = 0.8
link = 0.8
overlap = 0.5
memory = 0.9
"""


def test_machines_come_with_the_package() -> None:
    assert names() == ["a100", "h100", "h200", "mi300x"]
    for name in names():
        machine = load(name)
        assert machine.name.lower() == name and machine.element_bytes == 2 and not machine.shares_memory
    assert load("h200").flops == load("h100").flops
    assert load("h200").memory > load("h100").memory


def test_machine_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    assert load(str(path)) == from_text(TEXT, "text")
    assert load(str(path)).efficiency.overlap == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("memory_bandwidth =", "memory_bandwith ="),
            "unknown key memory_bandwith in machine file x: did you mean memory_bandwidth",
        ),
        (
            ("stream =", "streams ="),
            r"unknown key efficiency.streams in machine file x: did you mean efficiency.stream\?",
        ),
        (("flops = 1e12\n", ""), "machine file x: flops is missing"),
        (("product = 0.8\n", ""), "machine file x: efficiency.product is missing"),
        (("flops = 1e12", "flops = 'a'"), "machine file x: flops: expected a number, got a text$"),
        (("flops = 1e12", "flops = -1.0"), "machine file x: flops: expected a positive number, got -1"),
        (("flops = 1e12", "flops = nan"), "machine file x: flops: expected a positive number, got nan"),
        (("flops = 1e12", "flops = inf"), "expected a positive number, got inf"),
        (("product = 0.8", "product = 'a'"), "machine file x: efficiency.product: expected a number, got a text$"),
        (
            ("overlap = 0.5", "overlap = -0.1"),
            "efficiency.overlap: expected a share of at least 0 and at most 1, got -0.1",
        ),
        (
            ("overlap = 0.5", "overlap = nan"),
            "efficiency.overlap: expected a share of at least 0 and at most 1, got nan",
        ),
        (("product = 0.8", "product = 1.8"), "efficiency.product: expected a share above 0 and at most 1, got 1.8"),
        (("launch_s = 1e-6", "launch_s = 1e-6\nelement_bytes = 3"), "element_bytes: expected 2 or 4, got 3"),
        (('name = "x"', "name = "), "machine file x is not valid TOML"),
    ],
)
def test_wrong_machine_files(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(TEXT.replace(*change), "x")


def test_a_machine_may_overlap_nothing() -> None:
    assert from_text(TEXT.replace("overlap = 0.5", "overlap = 0"), "x").efficiency.overlap == 0


def test_unknown_machines() -> None:
    with pytest.raises(ValueError, match=r"unknown machine 'h10': did you mean h100\?"):
        load("h10")
    with pytest.raises(ValueError, match=r"machine file none\.toml: No such file"):
        load("none.toml")


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    more = [
        "--tokens",
        "1e12",
        "--price",
        "2",
        "--lr",
        "3e-4",
        "--lr-batch",
        "16",
        "--warmup-tokens",
        "1e9",
        "--top",
        "3",
    ]
    assert plan_command.main([*SMALL, *more, "--pipeline", "1", "--write", str(path)]) == 0
    out = capsys.readouterr().out
    assert "llama3-8b: 8.03 B parameters, 16 ranks of H100, 64 sequences of 8192 tokens a step, mpitrain" in out
    assert "days for 1,000 billion tokens" in out and "for a billion tokens, at 2 an hour for a rank" in out
    assert "learning rate 0.0006, warm-up 1,908 steps (square root: for Adam" in out
    for heading in ("seconds of a step", "memory of a rank", "a rank sends in a step", "why others lose"):
        assert heading in out
    assert "estimated; mpitrain lacks context parallelism" in out
    assert f"wrote {path}; use it with --config {path}" in " ".join(out.split())
    config = from_toml(path)
    assert (config.model.family, config.model.size, config.optim.warmup_steps) == ("llama", "8b", 1908)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main([*SMALL, "--json", "--tokens", "1e12", "--price", "2", "--top", "4"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["plans"]) == 4
    best = data["best"]
    assert best["lacks"] == ""
    assert best["step_s"] == pytest.approx(sum(best["seconds"].values()))
    assert best["memory_bytes"] == pytest.approx(sum(best["memory"].values()))
    assert best["cost"] == pytest.approx(1000 * best["cost_per_billion_tokens"])
    assert best["days"] == pytest.approx(1e12 / best["tokens_per_s"] / 86400)
    assert {"tensor", "gradients"} <= {*best["sent"]} and {*best["sent"]["gradients"]} == {
        "seconds",
        "node_bytes",
        "network_bytes",
    }
    assert all({"kind", "value", "why"} == {*other} for other in data["others"])


def test_34_days(capsys: pytest.CaptureFixture[str]) -> None:
    """Section 5.1 of 2104.04473, with the layout of `published`."""
    words = "--model gpt3-175b --ranks 1024 --machine a100 --batch 1536 --tokens 300e9 --price 2.5 --software megatron-2021 --json"
    words += " --tensor 8 --pipeline 8 --micro 1 --schedule 1f1b --recompute block"
    assert plan_command.main(words.split()) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["days"] == pytest.approx(34, rel=0.05)
    assert best["cost"] == pytest.approx(best["days"] * 24 * 1024 * 2.5)


def test_no_layout_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model", "llama3-70b", "--ranks", "2", "--machine", "h100", "--batch", "2"]
    assert plan_command.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "No layout fits. The one that needs least memory lacks" in out
    with pytest.raises(ValueError, match=r"no layout fits that the trainer can run, so .*plan.toml was not written"):
        plan_command.main([*words, "--write", str(tmp_path / "plan.toml")])
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.rest
def test_a_model_that_the_trainer_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    words = ["--model", "gpt3-175b", "--ranks", "128", "--machine", "h100", "--batch", "128", "--write", str(path)]
    assert plan_command.main(words) == 0
    assert "without [model]: the trainer lacks gpt3-175b" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama3-8b", "--batch", "4"], "plan: --ranks, --machine are missing; --help shows all options"),
        ([*SMALL, "--plot", "x.svg"], "plan: --plot needs --published"),
        ([*SMALL, "--lr-batch", "4"], "plan: --lr-batch and --warmup-tokens need --lr"),
        ([*SMALL, "--model", "llama4"], "unknown model 'llama4'"),
        ([*SMALL, "--machine", "b200"], "unknown machine 'b200'"),
        ([*SMALL, "--tensor", "5"], "no layout of llama3-8b on 16 ranks with a batch of 64 sequences, tensor 5"),
    ],
)
def test_wrong_arguments(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_command.main(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "argument --ranks: expected a whole number of at least 1, got 0"),
        (["--zero", "4"], "argument --zero: expected 0, 1, 2 or 3, got 4"),
        (["--price", "-1"], "argument --price: expected a positive number, got -1"),
        (["--tokens", "many"], "argument --tokens: expected a positive number, got many"),
        (["--software", "x"], "argument --software: invalid choice: 'x'"),
    ],
)
def test_wrong_numbers(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_command.main([*SMALL, *words])
    assert message in capsys.readouterr().err


def test_published(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plan_command.main(["--published", "--plot", str(tmp_path / "plan.svg")]) == 0
    assert "| Narayanan 2021, table 1 | a100 | 10 |" in capsys.readouterr().out
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("words", [["--published"], [*SMALL, "--simulate"]])
def test_a_picture_without_matplotlib_is_refused_at_once(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Python's own way to say that it cannot be imported
    with pytest.raises(
        ValueError, match=r"^--plot needs matplotlib: pip install 'mpitrain\[plot\]', or leave out --plot$"
    ):
        plan_command.main([*words, "--plot", str(tmp_path / "x.svg")])
    assert capsys.readouterr().out == ""


def test_an_error_is_one_line() -> None:
    words = [sys.executable, "-m", "mpitrain", "plan", "--model", "llama4"]
    result = subprocess.run(
        [*words, "--ranks", "8", "--machine", "h100", "--batch", "8"], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 1
    assert result.stderr.startswith("mpitrain: error: unknown model 'llama4'") and result.stderr.count("\n") == 1


@pytest.mark.rest
def test_simulate_the_best_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "run.svg"
    failures = ["--rank-mtbf-hours", "20000", "--checkpoint-seconds", "10", "--restart-seconds", "300"]
    assert plan_command.main([*SMALL, "--simulate", "--jitter", "0.01", *failures, "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "goodput" in shown and "llama3-8b, 16 ranks of H100: " in shown
    assert picture.read_text().startswith("<?xml")
    assert plan_command.main([*SMALL, "--simulate", "--json", "--pipeline", "2", "--schedule", "zb-v"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layout"]["pipeline"] == 2 and made["schedule"] == "zb-v" and made["ranks"] == 16


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_a_simulation_without_disturbances_takes_as_long_as_the_plan(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--pipeline", "4", "--tensor", "2", "--schedule", schedule, "--micro", "1"]
    plan_command.main([*SMALL, *fixed, "--json"])
    planned = json.loads(capsys.readouterr().out)["best"]["step_s"]
    plan_command.main([*SMALL, *fixed, "--simulate", "--json"])
    simulated = json.loads(capsys.readouterr().out)
    # The plan lets the busiest stage set the pace; the simulation has the stages as they are.
    assert simulated["ideal_step_s"] == pytest.approx(planned, rel=0.1)


@pytest.mark.rest
def test_simulate_16384_ranks_within_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3-405b", "--ranks", "16384", "--machine", "h100", "--batch", "2048", "--context", "8192"]
    begun = time.process_time()
    plan_command.main([*words, "--simulate", "--json", "--jitter", "0.01", "--slow-ranks", "16", "--mtbf-hours", "3"])
    assert time.process_time() - begun < 15  # 3 s on one core of a server
    assert 0 < json.loads(capsys.readouterr().out)["goodput"] < 1


def test_nothing_fits_to_be_simulated() -> None:
    with pytest.raises(ValueError, match="no layout fits that the trainer can run, so there is nothing to simulate"):
        plan_command.main(["--model", "llama3-405b", "--ranks", "2", "--machine", "h100", "--batch", "2", "--simulate"])
