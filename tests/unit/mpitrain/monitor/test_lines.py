"""metrics.jsonl over stops and crashes, and what stands on the terminal."""

import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpitrain.job.record.files.lines import LinesFile, is_evaluated
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.train.hardware import memory_bytes

METRICS = StepMetrics(
    step=10, time=1.5, loss=2.5, lr=1e-3, grad_norm=0.7, tokens_per_s=12345.6, step_s=0.2, data_s=0.01, forward_s=0.04, backward_s=0.08,
    optimizer_s=0.01, comm_s=0.05, comm_hidden_s=0.0, memory_bytes=250_000_000, mfu=0.3,
)  # fmt: skip


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, *steps: int) -> None:
    file = LinesFile(path, steps_done=0)
    for step in steps:
        file.write({"step": step, "loss": step / 8})
    file.write({"step": steps[-1], "heldout_loss": 0.5})
    file.close()


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2, 3, 4)
    file = LinesFile(path, steps_done=2)
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
    LinesFile(path, steps_done=9).close()
    assert [entry["step"] for entry in entries(path)] == [1, 2, 2]


def test_evaluations_are_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert not is_evaluated(path, 3)
    written(path, 1, 2, 3)
    assert is_evaluated(path, 3) and not is_evaluated(path, 2)


def test_a_full_disk_loses_no_line_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LinesFile(path, steps_done=0)
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


def test_no_number_is_not_finite(tmp_path: Path) -> None:
    skipped = replace(METRICS, loss=math.nan, grad_norm=math.inf, skipped=True)
    scaled = replace(skipped, loss=2.5, loss_scale=2.0**20)
    file = LinesFile(tmp_path / "metrics.jsonl", steps_done=0)
    for each in (skipped, scaled):
        file.write(each.to_dict())
    file.close()
    of_skipped, of_scaled = entries(tmp_path / "metrics.jsonl")
    assert of_skipped == {**METRICS.to_dict(), "loss": None, "grad_norm": None, "skipped": True}
    assert of_scaled == {**METRICS.to_dict(), "grad_norm": None, "loss_scale": 2.0**20, "skipped": True}
    more = replace(METRICS, more={"loss/prose": 2.0, "mine": 3.0}).to_dict()
    assert more == {**METRICS.to_dict(), "loss/prose": 2.0, "mine": 3.0}


def test_memory_of_this_process() -> None:
    assert 1e7 < memory_bytes(torch.device("cpu")) < 1e11
