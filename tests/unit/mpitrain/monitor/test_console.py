"""Lines of steps and events on the console, and the bar of a terminal."""

import math
import re
import sys
from dataclasses import replace

import pytest
from terminals import InTerminal, shown

from mpitrain.job.record.console import Terminal, describe
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.record.pace import Pace
from mpitrain.job.record.parsing.numbers import duration
from mpitrain.job.record.parsing.words import event_in_words

METRICS = StepMetrics(
    step=10, time=0.0, loss=2.5, lr=1e-3, grad_norm=0.7, tokens_per_s=12345.6, step_s=0.2, data_s=0.01, forward_s=0.05, backward_s=0.08,
    optimizer_s=0.01, comm_s=0.05, comm_hidden_s=0.0, memory_bytes=250_000_000, mfu=0.3,
)  # fmt: skip
SAVE = {"event": "save", "step": 20, "path": "runs/a/checkpoints/step-00000020", "cost_s": 0.125}


def test_a_step_in_one_line() -> None:
    assert describe(METRICS) == "loss 2.5000  12,346 tokens/s  200 ms  comm 25%  250 MB a rank"
    skipped = replace(METRICS, loss=math.nan, grad_norm=math.inf, skipped=True)
    assert describe(skipped).endswith("250 MB a rank  skipped: gradient norm inf")
    assert describe(replace(skipped, loss_scale=2.0**20)).endswith(
        "skipped: gradient norm inf at loss scale 1.04858e+06"
    )


def test_plain_lines_with_events_between(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_TTY", "0")
    terminal = Terminal(every=10, steps=25)
    for step in range(1, 26):
        terminal.step(replace(METRICS, step=step, skipped=step == 7))
        if step == 20:
            terminal.event(SAVE)
            terminal.event({"event": "straggler", "step": 20, "rank": 1})  # has its own line
    terminal.say("[bold]as it is[/bold]")
    terminal.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/25", "7/25", "10/25", "20/25", "20", "25/25"]
    assert lines[4] == "step 20  saved runs/a/checkpoints/step-00000020 (0.12 s)"
    assert lines[-1] == "[bold]as it is[/bold]"


SCRIPT = """
import time
from dataclasses import replace
from test_console import METRICS, SAVE, Terminal
terminal = Terminal(every=10, steps=40)
terminal.say("heading")
for step in range(1, 31):
    time.sleep(0.015)
    terminal.step(replace(METRICS, step=step, skipped=step == 7))
    if step == 20:
        terminal.event(SAVE)
        print("a line of another library", flush=True)
terminal.close()
terminal.say("saved")
"""


@pytest.mark.parametrize("columns", [40, 60])
def test_a_bar_below_the_lines_of_a_terminal(columns: int) -> None:
    folder = str(__file__).rpartition("/")[0]
    path = {"PYTHONPATH": f"{folder}:{folder}/../../../helpers:."}
    with InTerminal([sys.executable, "-c", SCRIPT], columns=columns, env=path) as terminal:
        assert terminal.end() == 0
    lines = [line.rpartition("\r")[2] for line in shown(terminal.output).replace("\r\n", "\n").split("\n")]
    text = " ".join("\n".join(lines).split())  # long lines are wrapped
    places = [text.index(f"step {step}/40 loss 2.5000 12,346 tokens/s 200 ms") for step in (1, 7, 10, 20, 30)]
    assert places == sorted(places)
    assert places[3] < text.index("step 20 saved runs/a/checkpoints/step-00000020 (0.12 s)") < places[4]
    assert "a line of another library" in lines
    bars = [line for line in lines if line.startswith("step 30/40") and "ms" not in line]
    assert max(map(len, bars)) <= columns
    assert bars[-1].startswith("step 30/40  ━━━" if columns >= 60 else "step 30/40  loss 2.5000  12.3k tokens/s")
    assert columns == 40 or re.search(r"  loss 2\.5000  12\.3k tokens/s  0:0\d left$", bars[-1])
    assert [line for line in lines if line][-1] == "saved" and "Traceback" not in terminal.output


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"])
def test_a_terminal_that_the_launcher_made_is_none(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPITRAIN_TTY", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert Terminal(every=1, steps=1).console.is_terminal
    monkeypatch.setenv(launcher, "0")
    assert not Terminal(every=1, steps=1).console.is_terminal


def test_the_time_left() -> None:
    pace = Pace()
    pace.add(100, 50.0)
    assert pace.left_s(200) is None
    pace.add(101, 50.5)
    pace.add(110, 60.0)
    assert pace.left_s(200) == 90.0 and pace.left_s(50) == 0.0
    pace.add(105, 61.0)  # the run went back
    assert pace.left_s(200) is None
    assert [duration(s) for s in (0.4, 59.6, 312, 11_275, 187_200)] == ["0:00", "1:00", "5:12", "3:07:55", "2 d 4 h"]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "begin", "source": "its beginning", "ranks": 4, "hosts": ["a", "a", "b", "b"], "device": "cpu",
          "layout": {"tp": 2, "pp": 1}},
         "begins: 4 ranks on 2 hosts, cpu (tp 2)"),
        ({"event": "straggler", "rank": 3, "host": "n1", "factor": 1.4, "cause": "cpu", "words": "its core is shared"},
         "rank 3 on n1 takes 1.40 times as long as the other ranks: its core is shared"),
        ({"event": "straggler", "rank": 3}, "straggler: rank 3"),  # of an older run
        ({"event": "spike", "what": {"loss": {"value": 9.25, "median": 2.0}}, "skipped": True},
         "spike: loss 9.25, median 2; the step is left out"),
        ({"event": "failure", "rank": 1, "host": "n1", "problem": "rank 1\n  was killed"}, "failure: rank 1 was killed"),
        ({"event": "sink", "sink": "wandb", "problem": "disk full"},
         "log.sinks: wandb has failed, and the run goes on without it: disk full"),
        ({"event": "shrink", "ranks": 3, "idle": 0, "layout": {}, "cost_s": 2.25}, "shrink: ranks 3, idle 0, 2.2 s lost"),
        ({"event": "new", "text": [1], "cost_s": None}, "new"),
        ({}, "?"),
    ],
)  # fmt: skip
def test_events_in_words(event: dict[str, object], words: str) -> None:
    assert event_in_words(event) == words
