"""The checkpoint of an earlier version is looked at by each rank for its own lanes: what one rank finds, all ranks follow."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import forge
from small_trainers import Make, maker

from collectives import Communicator
from mpitrain.job.config import ConfigError
from mpitrain.job.data.streaming.feed import Feed
from mpitrain.job.train.trainer import Trainer
from mpitrain.weights.state import OnDisk


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes small trainers in the test's folder, with a shard for each of two lanes. One begins with a byte-order mark."""
    if comm.rank == 0:
        for name, mark in (("a.jsonl", b""), ("b.jsonl", b"\xef\xbb\xbf")):
            lines = [json.dumps({"text": f"{name} {number} " * 40}).encode() for number in range(7)]
            (shared_tmp / name).write_bytes(mark + b"\n".join(lines))
    comm.barrier()
    made = maker(comm, shared_tmp, monkeypatch)
    words = ["--data.path", f"{shared_tmp}/[ab].jsonl", "--data.lanes", "2", "--data.heldout", "0"]
    words += ["--data.processes", "0"]
    return lambda run, steps, *args: made(run, steps, *words, *args)


def saved_by_an_earlier_version(make: Make, comm: Communicator) -> Path:
    """The checkpoint after a step, which leaves out the next one."""

    def edit(header: Any, meta: Any, tensors: Any) -> None:
        del meta["data"]["documents"]["order"]["data.reader"]
        meta.setdefault("health", {})["left_out"] = [[12, 24]]

    first = make("first", 1)
    first.fit()
    path = first.run.checkpoint(1)
    if comm.rank == 0:
        forge(path, edit)
    comm.barrier()
    return path


def rows_of(trainer: Trainer, comm: Communicator, step: int) -> np.ndarray:
    mine = [batch.tokens.numpy() for batch in trainer.batches.of_step(step)]
    return np.concatenate(comm.all_gather_object(np.concatenate(mine)))


@pytest.mark.ranks(2)
def test_all_ranks_begin_anew_if_one_has_to(make: Make, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_by_an_earlier_version(make, comm)
    with pytest.raises(ConfigError, match=r"b.jsonl of data has blank lines, byte-order marks"):
        make("first", 2).state.load(OnDisk(path))
    new, again = make("new", 3), make("again", 3)
    expected = [rows_of(new, comm, step) for step in range(2)]
    lines = again.state.load(OnDisk(path), is_own=False)
    (line,) = [line for line in lines if line.startswith("the data begin anew: data: b.jsonl of data has")]
    assert comm.all_gather_object(line) == [line] * 2
    assert again.batches.train.left_out == []
    for step in (1, 2):
        assert np.array_equal(rows_of(again, comm, step), expected[step - 1])
    is_as_before = Feed.is_as_before

    def fails_on_a_rank(feed: Feed, chunk: int) -> bool:
        if comm.rank == 1:
            raise OSError(5, "a disk is damaged")
        return is_as_before(feed, chunk)

    monkeypatch.setattr(Feed, "is_as_before", fails_on_a_rank)
    with pytest.raises(OSError, match="a disk is damaged"):
        make("other", 3).state.load(OnDisk(path), is_own=False)
