"""A bit that flips in a real job ends it on all ranks, with one line that names the rank, and the exit code of an error."""

import os
import platform
from pathlib import Path

import pytest
from launching import launch
from main_job import command
from run_events import faults

pytestmark = pytest.mark.rest

FLIP = """
import sys
import numpy as np
from mpitrain.cli import main
from mpitrain.job.train import trainer

take = trainer.Trainer.train_step

def train_step(self):
    if self.step == 29 and self.comm.rank == 1:
        param = max(self.model.parameters(), key=lambda each: each.numel())
        param.detach().view(-1).numpy().view(np.int32)[7] ^= 1 << 22
    return take(self)

trainer.Trainer.train_step = train_step
sys.exit(main(sys.argv[1:]))
"""


def test_a_flipped_bit_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(os.urandom(20_000))
    (tmp_path / "flip.py").write_text(FLIP)
    arguments = command(tmp_path / "run", tmp_path / "text", "--train.check-every", "10")[2:]
    result = launch(2, str(tmp_path / "flip.py"), *arguments, timeout_s=60)
    assert result.returncode == 1, str(result)
    said = f"mpitrain: error: step 30: rank 1 on {platform.node()}: bit 22 of an element (float32) of model/"
    assert result.stderr.count(said) == 1 and "Traceback" not in result.stderr, str(result)
    assert "step 29/60" in result.stdout and "step 30/60" not in result.stdout
    event, end = faults(tmp_path / "run")
    assert (event["event"], event["rank"], event["step"]) == ("flipped_bit", 1, 30)
    assert end["event"] == "failure" and end["problem"].startswith(said), end
