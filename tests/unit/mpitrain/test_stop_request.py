"""`python -m mpitrain stop`: a job of another process, here a thread's, is asked by its folder."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain.job.record.files.folder_lock import FolderLock
from mpitrain.job.record.files.marks import Marks
from mpitrain.job.train import stop_request
from mpitrain.job.train.stop_request import NAME, StopRequests, main


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_request, "EVERY_S", 0.0)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[FolderLock]:
    lock = FolderLock(tmp_path, token="job.1")
    yield lock
    lock.release()


class Job(threading.Thread):
    """Holds the lock until it is asked to stop; `ends`: with the mark of a regular end."""

    def __init__(self, folder: Path, lock: FolderLock, *, ends: bool = True) -> None:
        super().__init__(daemon=True)
        self.folder, self.lock, self.ends = folder, lock, ends
        self.was_asked = False

    def run(self) -> None:
        requests, until = StopRequests(self.folder), time.monotonic() + 10
        while not self.was_asked and time.monotonic() < until:
            self.was_asked = requests.are_for(self.lock.token)
            time.sleep(0.01)
        if self.ends:
            Marks(self.folder).done("stopped", 7)
        self.lock.release()


def test_a_job_is_asked_and_its_end_awaited(
    tmp_path: Path, lock: FolderLock, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, lock)
    job.start()
    assert main([str(tmp_path)]) == 0
    assert job.was_asked and not (tmp_path / NAME).exists()
    asked, ended = capsys.readouterr().out.splitlines()
    assert "is asked to save a checkpoint and to stop" in asked
    assert ended == f"{tmp_path} has stopped after step 7"


def test_an_end_without_a_stop_is_an_error(tmp_path: Path, lock: FolderLock) -> None:
    Job(tmp_path, lock, ends=False).start()
    with pytest.raises(RuntimeError, match=r"has ended before it could stop as asked: .*/\.lock is not there"):
        main([str(tmp_path)])


def test_a_job_that_does_not_stop(tmp_path: Path, lock: FolderLock) -> None:
    with pytest.raises(RuntimeError, match=r"has not stopped within 0.1 s; a longer --timeout"):
        main([str(tmp_path), "--timeout", "0.1"])
    assert not (tmp_path / NAME).exists()


def test_a_request_is_for_one_job(tmp_path: Path) -> None:
    requests = StopRequests(tmp_path)
    for content in (None, "", "{}", "[1]", '{"token": 1}', '{"token": "job.2"}'):
        if content is not None:
            (tmp_path / NAME).write_text(content)
        assert not requests.are_for("job.1"), content
    (tmp_path / NAME).write_text('{"token": "job.1"}')
    assert requests.are_for("job.1")
    (tmp_path / NAME).unlink()
    assert requests.are_for("job.1"), "a request stands"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}"], "stop: no job trains in {tmp}: {tmp}/.lock is not there"),
        (["{tmp}/none"], "stop: there is no run {tmp}/none; expected the folder of a run"),
        (["{tmp}", "--timeout", "0"], "stop: --timeout: expected seconds above 0, got 0.0"),
    ],
)
def test_what_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        main([word.format(tmp=tmp_path) for word in words])
    assert str(caught.value) == message.format(tmp=tmp_path)
