"""At the end of a batch job one rank of a node says which shards the job leaves there, also if it fails."""

import gzip
import json
import os
from pathlib import Path

import pytest
from small_trainers import Make, fails_at, maker

from collectives import Communicator


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes small trainers in the test's folder, with compressed documents."""
    if comm.rank == 0:
        with gzip.open(shared_tmp / "a.jsonl.gz", "wt") as shard:
            shard.writelines(json.dumps({"text": f"some words {number} " * 9}) + "\n" for number in range(200))
    comm.barrier()
    return maker(comm, shared_tmp, monkeypatch)


@pytest.mark.ranks(2)
def test_one_rank_says_it_once(
    comm: Communicator, make: Make, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def said() -> list[str]:
        comm.barrier()
        return [line for line in capfd.readouterr().err.splitlines() if "batch job" in line]

    cache = shared_tmp / "cache"
    words = (
        "--data.path",
        str(shared_tmp / "a.jsonl.gz"),
        "--data.cache",
        str(cache),
        "--data.heldout",
        "0",
        "--data.processes",
        "0",
    )
    monkeypatch.setenv("LSB_JOBID", "7")
    make("a", 2, *words).fit()
    lines = said()
    assert len(lines) == (comm.rank == 0)
    (shard,) = (path for path in (cache / f"mpitrain-shards-{os.getuid()}").iterdir() if "." not in path.name)
    assert all(
        f"leaves {shard.parent} on {os.uname().nodename}: 1 shard, {shard.stat().st_size:,} bytes" in line
        for line in lines
    )
    failing = make("b", 2, *words)
    fails_at(failing, 1)
    with pytest.raises(ValueError, match="on purpose"):
        failing.fit()
    assert len(said()) == (comm.rank == 0)
