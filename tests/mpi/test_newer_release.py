"""A run that goes on from what a newer release has written says so in one line, and goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from forging import forge
from small_trainers import Make, maker

import ckpt
from collectives import Communicator
from collectives.version import release
from mpitrain.job.train.checkpoints.newer import about_newer
from mpitrain.view.reading.run import read_run

NEWER = "99.1.0rc2 (commit 0123456789)"


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes small trainers in the test's folder."""
    return maker(comm, shared_tmp, monkeypatch)


def tell(told: Any, *, checkpoint: Path | None = None, run: Path | None = None) -> None:
    """Let a checkpoint, or the last start of a run, say that this release has written it."""

    def edit(header: Any, meta: Any, tensors: Any) -> None:
        header["release"] = told

    if checkpoint is not None:
        forge(checkpoint, edit)
    if run is not None:
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        next(event for event in reversed(events) if event["event"] == "begin")["release"] = told
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_a_run_names_the_newer_release_once(
    comm: Communicator, make: Make, shared_tmp: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def notices(run: str, steps: int, *args: str) -> list[str]:
        comm.barrier()
        make(run, steps, *args).fit()
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith("notice:")]

    first, run = make("a", 2), shared_tmp / "a"
    first.fit()
    path = first.run.checkpoint(2)
    assert ckpt.open(path).release == str(release())
    assert notices("a", 3) == [], "the same release"
    if comm.rank == 0:
        tell(NEWER, checkpoint=path)
    found = notices("b", 3, "--resume", str(path))
    assert len(found) == (comm.rank == 0)
    assert all(f"{path} was saved by mpitrain {NEWER}, which is newer than {release()} here" in line for line in found)
    if comm.rank == 0:
        tell(NEWER, run=run)
    assert notices("a", 3, "--resume", "never") == []
    if comm.rank == 0:  # where the earlier run is now
        (shared_tmp / "a.1").rename(shared_tmp / "c")
    found = notices("c", 4)
    assert len(found) == (comm.rank == 0)
    assert all(f"{shared_tmp / 'c'} was trained by mpitrain {NEWER}, which is newer" in line for line in found)
    assert notices("c", 5) == [], "this release was the last one"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("told", [None, 7, [NEWER], "", "99", "\x1b[2J99.0 (commit unknown)", "9" * 5000, f"{NEWER}\n"])
def test_what_is_no_release_says_nothing(make: Make, shared_tmp: Path, told: Any) -> None:
    ckpt.save(path := shared_tmp / "step-1", {}, comm=None)
    run = shared_tmp / "run"
    run.mkdir()
    (run / "events.jsonl").write_text(json.dumps({"event": "begin", "step": 0, "release": NEWER}) + "\n")
    assert NEWER in about_newer(None, run) and NEWER in " ".join(read_run(run).notes)
    tell(told, checkpoint=path, run=run)
    assert about_newer(path, run) == "" and read_run(run).notes == ["there is no config.toml"]
    assert about_newer(shared_tmp / "none", shared_tmp / "none") == ""
