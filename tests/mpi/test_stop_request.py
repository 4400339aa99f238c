"""A run stops as `python -m mpitrain stop` asks it to: all ranks after the same step, with a checkpoint."""

from pathlib import Path

import pytest
from small_trainers import in_step, maker

import ckpt
from collectives import Communicator
from mpitrain.job.record.files.marks import Done, read_done, write
from mpitrain.job.train import stop_request


@pytest.mark.ranks(2)
def test_a_run_that_is_asked_saves_and_stops(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_request, "EVERY_S", 0.0)
    trainer = maker(comm, shared_tmp, monkeypatch)("run", 20)
    folder = trainer.run.folder

    def ask() -> None:
        if comm.rank == 0:
            write(folder / stop_request.NAME, {"token": trainer.run.token})

    in_step(trainer, 3, ask)
    trainer.fit()
    assert trainer.step == 3
    assert read_done(folder, 0) == Done(0, "stopped", 3)
    newest = ckpt.latest(folder / "checkpoints")
    assert newest is not None and newest.name == "step-00000003"
