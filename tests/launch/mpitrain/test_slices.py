"""Runs with slices: the same bits at other numbers of ranks, after a resume, and after the loss of a rank."""

import sys
from pathlib import Path

from launching import launch, run

JOB = (
    *("-m", "mpitrain", "--train.slices", "4", "--train.batch", "8", "--train.steps", "6", "--checkpoint.every", "3"),
    *("--train.eval-batches", "2", "--train.sample-bytes", "0", "--model.layers", "2", "--model.width", "36"),
    *("--parallel.bind", "false"),
)
"""Rows of 36 elements are no multiple of a vector, so tails of shards are in the middle of parameters."""


def _same(one: Path, other: Path, *options: str) -> str:
    """What `diff` says of two runs, which are the same."""
    result = run([sys.executable, "-m", "mpitrain", "diff", str(one), str(other), *options])
    assert result.returncode == 0, str(result)
    return result.stdout


def test_a_run_has_the_same_bits_on_other_ranks_after_a_resume_and_in_other_layouts(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "three", "four")]
    started = launch(1, *JOB, "--run", str(folders[0]), timeout_s=90)
    assert "4 slices: the same bits at 1 to 4 ranks" in started.stdout, str(started)
    checkpoint = folders[0] / "checkpoints" / "step-00000003"
    resumed = launch(3, *JOB, "--run", str(folders[1]), "--resume", str(checkpoint), timeout_s=90)
    assert resumed.returncode == 0, str(resumed)
    assert "setting changed" not in resumed.stdout and "bits may differ" not in resumed.stdout
    _same(folders[0], folders[1], "--common")
    layout = ("--parallel.copies", "2", "--parallel.storage", "private")
    copies = launch(4, *JOB, "--run", str(folders[2]), *layout, timeout_s=90)
    assert copies.returncode == 0, str(copies)
    assert "keeps bits" in _same(folders[0], folders[2])
    of_six = [Path(folder / "checkpoints" / "step-00000006") for folder in folders]
    assert all(path.exists() for path in of_six)
