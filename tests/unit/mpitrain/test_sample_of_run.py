"""How long the sample is that a run makes at its end."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.job.config import Config
from mpitrain.job.config.settings import TrainConfig
from mpitrain.job.train.trainer import Trainer


@pytest.mark.parametrize(
    ("job", "asked", "expected"),
    [(None, None, 400), ("SLURM_JOB_ID", None, 0), ("PBS_JOBID", None, 0), ("SLURM_JOB_ID", 400, 400), (None, 0, 0)],
)
def test_a_batch_job_makes_none_unless_asked(
    monkeypatch: pytest.MonkeyPatch, job: str | None, asked: int | None, expected: int
) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    if job:
        monkeypatch.setenv(job, "7")
    trainer: Any = SimpleNamespace(config=Config(train=TrainConfig(sample_bytes=asked)))
    assert Trainer._num_sampled.fget(trainer) == expected  # type: ignore[attr-defined]
