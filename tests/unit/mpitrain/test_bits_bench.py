"""`python -m mpitrain bench bits`: runs that differ, jobs that fail, wrong arguments. launch/mpitrain/test_slices.py has real runs."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckpt
from benchmarks.monitoring.recorded_runs import write_run
from mpitrain.cli import main
from mpitrain.tools.bench.bits.runs import FailedError, difference


@pytest.fixture
def handler_of_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def make_run(folder: Path, seed: int, value: float) -> Path:
    write_run(folder, steps=6, ranks=1, seed=seed)
    ckpt.save(folder / "checkpoints/step-00000006", {"model/weight": np.float32([1.0, value])}, comm=None, meta={})
    return folder


def test_a_difference_names_the_step_and_the_tensor(tmp_path: Path) -> None:
    reference, same = (make_run(tmp_path / name, 0, 2.0) for name in ("reference", "same"))
    other = make_run(tmp_path / "other", 1, 3.0)
    assert difference(reference, same, first=1, last=6) == ""
    said = difference(reference, other, first=1, last=6)
    assert said.startswith("first step that differs: 1, in loss") and "model/weight: 1 of 2 elements differ" in said
    with pytest.raises(FailedError, match="one of the steps 1 to 7"):
        difference(reference, same, first=1, last=7)


@pytest.mark.usefixtures("handler_of_sigterm")
def test_a_job_that_fails_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`cat` is no launcher, and says so."""
    assert main(["bench", "bits", "--cases", "ranks", "--launcher", "cat", "--folder", str(tmp_path)]) == 2
    (output,) = tmp_path.glob("mpitrain-bits.*/gpt-1.txt")
    assert (
        capsys.readouterr().err
        == f"mpitrain: error: bench bits: the run on one rank failed: exit code 1; the output is in {output}\n"
    )
    assert "cat" in output.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 3", "--steps: expected at least 4, got 3"),
        ("--stops 2,50", "--stops: expected steps from 1 to 49, got 50"),
        ("--cases copies --ranks 3,5", "--ranks: no case fits 3, 5: copies needs a multiple of 2"),
        ("--launcher nosuch", "--launcher: there is no command 'nosuch'"),
        ("--json {tmp}/none/figures", "--json: there is no folder {tmp}/none"),
        ("--cases copy", "argument --cases: invalid choice: 'copy'; expected of ranks, stage-0, "),
    ],
)
def test_wrong_arguments(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bits", *(word.format(tmp=tmp_path) for word in words.split())]) == 1
    assert capsys.readouterr().err.startswith(f"mpitrain: error: bench bits: {message.format(tmp=tmp_path)}")
