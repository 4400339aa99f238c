"""The command of log.on_event: it gets each event, holds up nothing, and outlives the process."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpitrain.job.record.files import alerts
from mpitrain.job.record.files.alerts import Alerts

EVENT = {"time": "2026-01-01T00:00:00.000+00:00", "event": "spike", "rank": None, "words": 'it\'s "é"\n$HOME'}


def made(command: str, folder: Path, say: Callable[[str], object]) -> Alerts:
    return Alerts(command, folder, say, environment={"PATH": os.environ["PATH"], "RUN": str(folder)})


def appeared(path: Path) -> str:
    """The text of a file, when it is there."""
    until = time.monotonic() + 20
    while not (path.exists() and path.read_text()) and time.monotonic() < until:
        time.sleep(0.005)
    return path.read_text()


def awaited(lines: Callable[[], list[str]], num: int) -> list[str]:
    """So many lines, when they are there."""
    until = time.monotonic() + 20
    while len(found := lines()) < num and time.monotonic() < until:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("at_once", [1, alerts.AT_ONCE])
def test_each_event_is_one_line_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(alerts, "AT_ONCE", at_once)
    said: list[str] = []
    told = made('echo working; cat >> "$RUN/told"', tmp_path, said.append)
    for step in range(20):
        told.tell({**EVENT, "step": step})
    told.close()
    lines = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    if at_once > 1:  # commands start in the order of events, and those that run at the same time end in any order
        lines.sort(key=lambda line: line["step"])
    assert lines == [{**EVENT, "step": step} for step in range(20)]
    assert (tmp_path / alerts.NAME).read_text() == "working\n" * 20
    assert said == []


@pytest.mark.parametrize(
    ("command", "what"),
    [("exit 3", "ended with code 3"), ("no-such-command", "ended with code 127"), ("kill -9 $$", "ended")],
)
def test_a_command_that_fails_is_told_once(tmp_path: Path, command: str, what: str) -> None:
    said: list[str] = []
    told = made(command, tmp_path, said.append)
    for _ in range(6):
        told.tell(EVENT)
    told.close()
    (line,) = said
    assert line.startswith(f"log.on_event: the command {what}") and str(tmp_path / alerts.NAME) in line


def test_a_command_that_cannot_start_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    told = Alerts("true", tmp_path / "no-folder", said.append, environment={"PATH": "/nowhere"})
    for _ in range(2):
        told.tell(EVENT)
    told.close()
    (line,) = said
    assert "cannot be run" in line and "No such file" in line


def test_slow_commands_hold_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "CLOSE_S", 0.05)
    monkeypatch.setattr(alerts, "MOST_WAITING", 3)
    said: list[str] = []
    told = made('cat >> "$RUN/told"; while [ -d "$RUN/busy" ]; do sleep 0.05; done', tmp_path, said.append)
    (tmp_path / "busy").mkdir()
    for step in range(alerts.AT_ONCE + 5):
        told.tell({"event": "spike", "step": step})
    began = time.monotonic()
    told.tell({"event": "failure"})
    told.close()
    assert time.monotonic() - began < 10, "the commands would go on for 60 s"
    assert "3 events wait" in said[0] and "5 events were dropped" in said[1]
    events = awaited(lambda: appeared(tmp_path / "told").splitlines(), alerts.AT_ONCE + 1)
    steps = {json.loads(line).get("step") for line in events}
    assert steps == {None, *range(alerts.AT_ONCE)}, "the failure does not wait"
    (tmp_path / "busy").rmdir()


def test_signals_to_all_processes_of_a_step_do_not_end_a_command(tmp_path: Path) -> None:
    """As Slurm sends them when it ends a job; the last event is that of the end."""
    said: list[str] = []
    told = made(
        'for name in TERM USR1 USR2; do kill -s $name 0; done; sh -c "kill -s TERM 0"; cat > "$RUN/told"',
        tmp_path,
        said.append,
    )
    told.tell(EVENT)
    told.close()
    assert json.loads((tmp_path / "told").read_text()) == EVENT
    assert said == []


@pytest.mark.rest
def test_a_command_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "COMMAND_S", 1)
    said: list[str] = []
    made("sleep 50", tmp_path, said.append).tell(EVENT)
    assert "did not end in 1 s" in awaited(lambda: said, 1)[0]


def test_a_failure_is_told_though_the_process_ends(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from mpitrain.job.record.files.alerts import Alerts
told = Alerts("sleep 0.1; cat > $RUN/told", Path({str(tmp_path)!r}), print, environment=os.environ | {{"RUN": {str(tmp_path)!r}}})
told.tell({{"event": "failure", "problem": "x" * 200_000}})
os.kill(os.getpid(), 9)
"""
    environment = dict(os.environ) | {"PYTHONPATH": ":".join(sys.path)}
    # The command would hold the pipe open if it had the output of the process.
    done = subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, timeout=20)
    assert done.returncode == -9, done.stderr
    assert json.loads(appeared(tmp_path / "told"))["problem"] == "x" * 200_000
