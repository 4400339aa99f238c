"""`python -m mpitrain bench monitoring`, short."""

import pytest

from benchmarks.monitoring.monitoring_command import main

pytestmark = pytest.mark.rest


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1", "--steps", "3", "--most-steps", "60"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("metrics.jsonl", "csv", "tensorboard", "torch.utils.tensorboard"))
    (line,) = [line for line in text.splitlines() if line.startswith("| 2 ")]
    assert " 60 |" in line and line.count(" s |") == 2 and " MB |" in line
