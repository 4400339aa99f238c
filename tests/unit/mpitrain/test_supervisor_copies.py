"""The supervisor removes the copies of a run in node memory at its end, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT

from mpitrain.job.elastic.copies import folders
from mpitrain.job.elastic.copies.files import CopyFile, files_of, path_of
from mpitrain.job.elastic.copies.folders import own_folder
from mpitrain.job.elastic.copies.holding import hold, release
from mpitrain.job.elastic.copies.remote import script
from mpitrain.job.elastic.lease import raise_lease
from mpitrain.job.elastic.supervisor.agents import count, parse_agent
from mpitrain.job.elastic.supervisor.mpi_files.sessions import VARIABLES


def removed(run: str) -> int:
    """Remove a run's copies from this host; returns their number."""
    return sum(count(parse_agent("false"), [], script(run), 10.0, {}).values())


def test_what_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "node memory"
    room.mkdir()
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(room))
    (room / f"mpitrain-{os.getuid()}").touch()
    CopyFile(path_of("abc", 1, 0, 0), 16, 16).close()
    (room / f"mpitrain-{os.getuid()}").unlink()
    hold("abc")
    release("abc")
    for job, rank in (("4711", 0), ("1[2].srv", 1)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        CopyFile(path_of("abc", 2, rank, 0, for_partner=bool(rank)), 16, 16).close()
    other = path_of("abcd", 1, 0, 0)
    CopyFile(other, 16, 16).close()
    strange = own_folder() / "copy-abc-link"
    strange.symlink_to(other)
    outside = room / "copy-abc-local-00000001-00000.0"
    outside.touch()
    hold("abc")  # as a job whose run folder was copied, with the id in it
    assert removed("abc") == 0
    release("abc")
    assert removed("abc") == 4
    assert files_of("abcd") == [other] and files_of("abc") == [strange] and outside.exists()
    strange.unlink()
    assert removed("abcd") == 1
    assert list(room.iterdir()) == [outside], "the empty folders too"
    assert removed("abcd") == 0


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path))
    own = tmp_path / "own"
    own.mkdir()
    (own / "copy-abc-x").touch()
    (tmp_path / f"mpitrain-{os.getuid()}").symlink_to(own)
    assert subprocess.run(["sh", "-eu", "-c", script("abc")], timeout=10).returncode == 0
    assert (own / "copy-abc-x").exists()


@pytest.mark.rest
@pytest.mark.parametrize(("reason", "num_left"), [("finished", 0), ("stopped", 0), ("refused", 1)])
def test_a_run_that_ends_with_a_checkpoint_leaves_none(
    reason: str, num_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is as of a host whose ranks were lost before the end."""
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path))
    run = tmp_path / "run"
    run.mkdir()
    lease = raise_lease(run)
    CopyFile(path_of(lease.run, 1, 0, 0), 16, 16).close()
    job = "from pathlib import Path; from mpitrain.job.record.files.marks import Marks; "
    job += f"Marks(Path({str(run)!r})).done({reason!r}, 3)"
    command = ["elastic", "--run", str(run), "--agent", "false", "--", sys.executable, "-c", job]
    result = subprocess.run([sys.executable, "-m", "mpitrain", *command], capture_output=True, text=True, timeout=60)
    assert result.returncode == (1 if num_left else 0), result.stderr
    assert len(files_of(lease.run)) == num_left, result.stderr
    assert ("removed 1 file of copies" in result.stderr) == (not num_left), result.stderr


@pytest.mark.parametrize(("state", "num_asked"), [("RUNNING", 3), ("COMPLETING", 1)])
def test_other_hosts_are_not_asked_to_remove_anything_while_slurm_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, num_asked: int
) -> None:
    """Before the launch; and in a job that goes on for mpirun's folder and for the copies of the run's state."""
    run, asked = tmp_path / "run", tmp_path / "asked"
    run.mkdir()
    raise_lease(run)
    job = "from pathlib import Path; from mpitrain.job.record.files.marks import Marks; Marks(Path('run')).done('stopped', 3)"
    programs = {
        "squeue": f"echo {state}",
        "mpirun": f'[ "$1" != --version ] || exec echo Open MPI\nexec {sys.executable} -c "{job}"',
        "reach": f'[ "$1" = far ] && echo . >> {asked} && eval "$2"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in VARIABLES:
        monkeypatch.setenv(name, str(tmp_path))
    command = ["elastic", "--run", "run", "--agent", "reach", "--", "mpirun", "-H", "localhost,far", "-np", "2", "a"]
    words = [sys.executable, "-m", "mpitrain", *command]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert asked.read_text().count(".") == num_asked, result.stderr
    assert ("may stay on far: not reached" in result.stderr) == (state == "COMPLETING"), result.stderr


def test_a_folder_that_another_rank_removes_meanwhile_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        """Removed after the look whether it is there, and before that into it."""

        def glob(self, pattern: str) -> Iterator[Path]:
            raise FileNotFoundError

    (tmp_path / "copy-abc-1").touch()
    monkeypatch.setattr(folders, "own_folders", lambda: [Gone(), tmp_path])
    assert files_of("abc") == [tmp_path / "copy-abc-1"]
