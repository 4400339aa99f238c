"""A job whose run folder another job took over, after it was stopped for long: it ends on all ranks and writes nothing more."""

import json
from pathlib import Path
from typing import Any

import pytest

from collectives import Communicator
from mpitrain.job.config import parse
from mpitrain.job.record.files.folder_lock import STALE_S
from mpitrain.job.train.trainer import Trainer

SETTINGS = """--model.width 8 --model.layers 1 --model.heads 2 --model.context 8 --train.batch 12 --train.steps 9 --train.eval-batches 0
--train.sample-bytes 0 --checkpoint.every 2 --checkpoint.keep 9 --parallel.no-bind --parallel.threads 1"""
pytestmark = pytest.mark.ranks(1, 2)

THEIRS = {"host": "node7", "pid": 12, "start": "1", "token": "theirs", "place": "another boot", "job": "4711"}


def test_a_job_that_lost_its_folder_ends_and_writes_nothing_more(
    comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPITRAIN_RECORD_DIR", str(shared_tmp))
    monkeypatch.setenv("MPITRAIN_TTY", "0")
    text, folder = shared_tmp / "text", shared_tmp / "run"
    if comm.rank == 0:
        text.write_bytes(b"node rank shard unit " * 1000)
    comm.barrier()
    trainer = Trainer(parse([*SETTINGS.split(), "--data.path", str(text), "--run", str(folder)]), comm)
    take = trainer.train_step

    def train_step() -> Any:
        if trainer.step == 4 and comm.rank == 0:
            (folder / ".lock").write_text(json.dumps(THEIRS))
            assert trainer.run._lock is not None
            trainer.run._lock._beaten -= STALE_S  # as after SIGSTOP: the thread that beats has not run yet
        return take()

    monkeypatch.setattr(trainer, "train_step", train_step)
    with pytest.raises(
        RuntimeError,
        match=r"run belongs to another job now: process 12 on node7 \(job 4711\) took over.*ends without a save",
    ):
        trainer.fit()
    comm.barrier()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000004"]
    assert json.loads((folder / ".lock").read_text()) == THEIRS
