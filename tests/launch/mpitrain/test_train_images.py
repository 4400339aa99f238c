"""The example of a vision model: it trains on tar files, and goes on at another number of ranks."""

import re
from pathlib import Path

import pytest
from launching import ROOT, launch

pytestmark = pytest.mark.rest


def test_the_example_learns_and_goes_on(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "train_images.py")
    shown: list[tuple[str, float]] = []
    for num_ranks in (2, 1):
        result = launch(num_ranks, example, cwd=tmp_path)
        assert result.returncode == 0, str(result)
        shown += [
            (step, float(share))
            for step, share in re.findall(r"step (\d+)  held-out accuracy ([\d.]+)%", result.stdout)
        ]
    assert [step for step, _ in shown] == ["60", "120"]
    assert shown[0][1] > 70 and shown[1][1] > 90
