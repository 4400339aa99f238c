"""metrics.jsonl over stops and crashes, and what stands on the terminal."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mpitrain.train.metrics import MetricsFile, StepMetrics, Terminal, describe, is_evaluated, memory_bytes

METRICS = StepMetrics(10, 2.5, 1e-3, 0.7, 12345.6, 0.2, 0.05, 0.01, 250_000_000, 0.3)


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, *steps: int) -> None:
    file = MetricsFile(path, steps_done=0)
    for step in steps:
        file.write({"step": step, "loss": step / 8})
    file.write({"step": steps[-1], "heldout_loss": 0.5})
    file.close()


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2, 3, 4)
    file = MetricsFile(path, steps_done=2)
    assert [entry["step"] for entry in entries(path)] == [1, 2]
    file.write({"step": 3, "loss": 9.0})
    assert entries(path)[-1] == {"step": 3, "loss": 9.0}, "a line is there at once"
    file.close()


@pytest.mark.parametrize("torn", ['{"step": 5, "lo', '{"step": 5}', "[5]\n", "{}\n", "\x00\x00\n", "5\n"])
def test_what_a_killed_process_left_is_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2)
    with path.open("a") as file:
        file.write(torn)
    MetricsFile(path, steps_done=9).close()
    assert [entry["step"] for entry in entries(path)] == [1, 2, 2]


def test_evaluations_are_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert not is_evaluated(path, 3)
    written(path, 1, 2, 3)
    assert is_evaluated(path, 3) and not is_evaluated(path, 2)


def test_a_full_disk_loses_no_line_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, steps_done=0)
    real = file._file

    class Full:
        def __init__(self) -> None:
            self.left = 10

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(errno.ENOSPC, "No space left on device")
            data, self.left = data[: self.left], max(self.left - len(data), 0)
            return real.write(data)

    monkeypatch.setattr(file, "_file", Full())
    file.write({"step": 1, "loss": 1.0})
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        file.check()
    file.write({"step": 2, "loss": 2.0})
    monkeypatch.setattr(file, "_file", real)
    file.write({"step": 3, "loss": 3.0})
    file.check()
    file.close()
    assert [entry["step"] for entry in entries(path)] == [1, 2, 3]


def test_a_step_in_one_line() -> None:
    assert describe(METRICS) == "loss 2.5000  12,346 tokens/s  200 ms  comm 25%  250 MB a rank"


def test_a_skipped_step_is_said_and_no_number_is_null(tmp_path: Path) -> None:
    skipped = METRICS._replace(loss=math.nan, grad_norm=math.inf, skipped=True)
    assert describe(skipped).endswith("250 MB a rank  skipped: gradient norm inf")
    scaled = skipped._replace(loss=2.5, loss_scale=2.0**20)
    assert describe(scaled).endswith("skipped: gradient norm inf at loss scale 1.04858e+06")
    file = MetricsFile(tmp_path / "metrics.jsonl", steps_done=0)
    for each in (skipped, scaled):
        file.write(each.to_dict())
    file.close()
    of_skipped, of_scaled = entries(tmp_path / "metrics.jsonl")
    assert of_skipped == {**METRICS.to_dict(), "loss": None, "grad_norm": None, "skipped": True}
    assert of_scaled == {**METRICS.to_dict(), "grad_norm": None, "loss_scale": 2.0**20, "skipped": True}
    assert list(METRICS.to_dict()) == list(METRICS._fields[:-4])


def test_plain_lines_every_so_often(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_TTY", "0")
    terminal = Terminal(every=10, steps=25)
    for step in range(1, 26):
        terminal.step(METRICS._replace(step=step, skipped=step == 7))
    terminal.say("[bold]as it is[/bold]")
    terminal.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/25", "7/25", "10/25", "20/25", "25/25"]
    assert lines[-1] == "[bold]as it is[/bold]"


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"])
def test_a_terminal_that_the_launcher_made_is_none(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPITRAIN_TTY", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert Terminal(every=1, steps=1).console.is_terminal
    monkeypatch.setenv(launcher, "0")
    assert not Terminal(every=1, steps=1).console.is_terminal


def test_memory_of_this_process() -> None:
    assert 1e7 < memory_bytes(torch.device("cpu")) < 1e11
