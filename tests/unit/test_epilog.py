"""The epilog of docs/admin.md removes what it says, as the user, and nothing else."""

import fcntl
import os
import pwd
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/admin.md"
UID = pwd.getpwnam("daemon").pw_uid


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder for all users, as /dev/shm is. That of pytest is for this user alone."""
    if os.geteuid() != 0:
        pytest.skip("an epilog runs as root")
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def run(memory: Path, job: str = "7", uid: int = UID) -> None:
    """It ends well, because Slurm drains the node of an epilog that fails."""
    (text,) = re.findall(r"^```\n(#!/bin/sh\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "/dev/shm" in text
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_UID": str(uid), "SLURM_JOB_ID": job}
    words = ["sh", "-c", text.replace("/dev/shm", str(memory))]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def made(path: Path) -> Path:
    """A file of the user, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    for each in (path, *path.parents):
        if each.stat().st_mode & 0o1000:
            break
        os.chown(each, UID, -1)
        each.chmod(0o700)
    return path


def test_it_removes_the_copies_of_the_job_and_environments_in_which_nothing_runs(memory: Path) -> None:
    own, pack = memory / f"mpitrain-{UID}", memory / f"mpitrain-pack-{UID}"
    gone = [made(own / "copy-abc-job7-00000001-00000.0"), made(own.with_name(f"{own.name}.3") / "copy-x-job7-1.0")]
    stay = [made(own / "copy-abc-job77-00000001-00000.0"), made(own / "copy-abc-held")]
    gone += [made(pack / name) for name in ("0123/.remover", "012e/.stay", ".new.abc/env/file", "4567.dead/env/file")]
    gone.append(made(pack.with_name(f"{pack.name}.1") / "0123/.remover"))
    gone.append(made(memory / "mpitrain-pack-0/0123/.stay"))  # of a container in which the user is root
    stay.append(made(pack / "89ab/.remover"))
    rank = os.open(pack / "89ab", os.O_RDONLY)
    fcntl.flock(rank, fcntl.LOCK_SH)
    run(memory)
    assert [path for path in gone if path.exists()] == []
    assert [path for path in stay if not path.exists()] == []
    assert sorted(path.name for path in pack.iterdir()) == ["89ab"]
    os.close(rank)
    for _ in range(2):  # the second time nothing is there
        run(memory, "8")
        assert sorted(pack.iterdir()) == []


def test_it_removes_nothing_because_of_its_name_alone_and_ends_well(memory: Path) -> None:
    """Folders that the user has made himself, and what he may do against an epilog."""
    names = (
        "mpitrain-pack-results/0123",
        f"mpitrain-{UID}x",
        "mpitrain-mine",
        f"mpitrain-pack-{UID}/abc",
        f"mpitrain-{UID}.8",
    )
    stay = [made(memory / name / "copy-of-job7-notes") for name in names]
    shut = made(memory / f"mpitrain-pack-{UID}.1/0.dead/file").parent
    shut.chmod(0o500)
    open_to_all = made(memory / f"mpitrain-{UID}/copy-abc-job7-1.0")
    open_to_all.parent.chmod(0o755)
    closed = made(memory / f"mpitrain-pack-{UID}.2/0123/.remover")
    closed.parent.parent.chmod(0)
    run(memory)
    assert [path for path in (*stay, open_to_all, closed) if not path.exists()] == []
    shut.chmod(0o700)
    run(memory, uid=4_000_000)  # nobody has this number


def test_it_can_do_what_the_user_can_and_no_more(memory: Path) -> None:
    """Links in a folder of his lead to files of root and of root's group."""
    roots = memory / "roots"
    (roots / "0123").mkdir(parents=True)
    kept = roots / "copy-abc-job7-00000001-00000.0"
    kept.touch()
    roots.chmod(0o770)
    (memory / f"mpitrain-{UID}").symlink_to(roots)
    (memory / f"mpitrain-pack-{UID}").symlink_to(roots)
    own = made(memory / "home" / kept.name)
    (memory / "mpitrain-12345").symlink_to(own.parent)  # of another user, to a folder of the user
    (memory / f"mpitrain-pack-{UID}.1").mkdir()  # of root
    (memory / f"mpitrain-pack-{UID}.1/0123").mkdir()
    run(memory)
    assert sorted(path.name for path in roots.iterdir()) == ["0123", kept.name]
    assert (memory / f"mpitrain-pack-{UID}.1/0123").is_dir() and own.exists()
