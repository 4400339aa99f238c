"""The folders of mpirun, and the shared memory of MPI: what the supervisor removes, and what it must not."""

import mmap
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT

from mpitrain.elastic.marks import SUPERVISOR_VARIABLE
from mpitrain.elastic.supervisor import mpi_files
from mpitrain.elastic.supervisor.mpi_files import PREFIX, VARIABLES, Session, Sessions, make, script
from mpitrain.elastic.supervisor.words import parse

PRTE, ORTE = VARIABLES
OPEN_MPI = parse(["mpirun", "-np", "2", "a"], "openmpi")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "a place"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("variable", [PRTE, ORTE, "TMPDIR"])
def test_a_launch_gets_a_folder_of_its_own_where_the_user_wants_it(place: Path, variable: str) -> None:
    others = {"TMPDIR": "/nonexistent"} if variable != "TMPDIR" else {PRTE: ""}
    first, second = (make(OPEN_MPI, {**others, variable: str(place)}) for _ in range(2))
    assert first is not None and second is not None
    assert {Path(first.folder), Path(second.folder)} == set(place.iterdir())
    its = os.stat(first.folder)
    assert (stat.S_IMODE(its.st_mode), its.st_uid) == (0o700, os.getuid())


@pytest.mark.parametrize(
    ("words", "kind", "environ"),
    [
        (["mpirun", "-np", "2", "a"], "mpich", {}),
        (["mpirun", "--prtemca", "prte_tmpdir_base", "/scratch", "a"], "openmpi", {}),
        (["mpirun", "--mca", "orte_local_tmpdir_base", "/scratch", "a"], "openmpi", {}),
        (["mpirun", "a"], "openmpi", {"PRTE_MCA_prte_remote_tmpdir_base": "/scratch"}),
        (["mpirun", "a"], "openmpi", {"HOME": "home"}),
        (["mpirun", "a"], "openmpi", {PRTE: "/nonexistent/folder"}),
    ],
)
def test_a_place_that_the_user_has_set_otherwise_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], kind: str, environ: dict[str, str]
) -> None:
    monkeypatch.chdir(place)
    parameters = place / "home/.prte/mca-params.conf"
    parameters.parent.mkdir(parents=True)
    parameters.write_text("# of the site\nprte_local_tmpdir_base = /scratch\n")
    assert make(parse(words, kind), {"TMPDIR": str(place), **environ}) is None  # type: ignore[arg-type]


def test_without_a_writable_place_of_the_user_it_lies_in_the_usual_one() -> None:
    session = make(OPEN_MPI, {"TMPDIR": "/proc"})
    assert session is not None
    Path(session.folder).rmdir()
    assert Path(session.folder).parent in (Path("/tmp"), Path("/var/tmp"))


def begun(place: Path) -> Session:
    """A folder with what a killed mpirun has left."""
    session = make(OPEN_MPI, {"TMPDIR": str(place)})
    assert session is not None
    for name in ("ompi.17/1", "prted.18", f"{PREFIX}x/ompi.19"):
        Path(session.folder, name).mkdir(parents=True)
    Path(session.folder, "ompi.17/hwloc.sm").touch()
    return session


def clean(*sessions: Session, host: str = "localhost") -> str:
    """The numbers of the folders that were removed."""
    lines = script(sessions, host) + 'echo "$removed"\n'
    return subprocess.run(["sh", "-c", lines], capture_output=True, text=True, check=True, timeout=20).stdout.strip()


@pytest.mark.parametrize("host", ["localhost", "far"])
def test_only_the_folder_of_the_launch_is_removed(place: Path, host: str) -> None:
    mine, other = begun(place), begun(place)
    user = place / "ompi.70007"
    user.mkdir()
    assert clean(mine, Session(f"{place}/none", "1:1"), host=host) == "0"
    assert set(place.iterdir()) == {Path(other.folder), user}


def test_what_stands_in_its_place_now_is_not_removed(place: Path) -> None:
    linked, swapped, kept = begun(place), begun(place), begun(place)
    victim = place / "ompi.70007"
    (victim / "ompi.1").mkdir(parents=True)
    os.rename(linked.folder, place / "a")
    os.symlink(victim, linked.folder)
    os.rename(swapped.folder, place / "b")
    (Path(swapped.folder) / "ompi.1").mkdir(parents=True)
    Path(kept.folder, "thesis.tex").touch()
    assert clean(linked, swapped, kept) == ""
    assert clean(linked, kept, host="far") == ""
    for folder in (victim / "ompi.1", Path(swapped.folder, "ompi.1"), Path(kept.folder, "thesis.tex")):
        assert folder.exists()


def test_the_folder_of_a_host_without_an_answer_is_removed_later(place: Path) -> None:
    sessions = Sessions()
    settings = sessions.begin(OPEN_MPI, {"TMPDIR": str(place)}, ["localhost", "far1", "far2"])
    assert set(settings) == set(VARIABLES)
    (folder,) = set(settings.values())
    assert sessions.settle({"localhost": {0}, "far1": {0}}) == [f"removed mpirun's folder {folder} on this host, far1"]
    assert sessions.hosts() == {"far2"}
    assert sessions.settle({"localhost": (), "far2": {0}}) == [f"removed mpirun's folder {folder} on far2"]
    assert sessions.left == []


MAPS = """
import mmap, sys
kept = []
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 0))
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_only_shared_memory_that_the_job_has_made_and_nobody_uses_is_removed() -> None:
    number = time.monotonic_ns()
    old, new, used, user = (
        Path(f"/dev/shm/{name}") for name in (f"sm_segment.h.0.{number:x}.{rank}" for rank in (0, 1, 2, "thesis"))
    )
    files = [old, new, used, user]
    try:
        old.write_bytes(bytes(4096))
        time.sleep(0.3)
        since = time.time()
        for path in files[1:]:
            path.write_bytes(bytes(4096))
        env = {**os.environ, SUPERVISOR_VARIABLE: f"me-{number}"}
        words = [sys.executable, "-c", MAPS, *map(str, files)]
        with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
            assert job.stdout is not None and job.stdout.readline() == b"mapped\n"
            found = mpi_files.find_segments(f"me-{number}")
            assert {segment.path for segment in found} == {str(path) for path in (old, new, used)}
            mpi_files.remove_segments(found, since)
            assert all(path.exists() for path in files), "the job still has them mapped"
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            file.close()
            mpi_files.remove_segments(found, since)
        assert [path.exists() for path in files] == [True, False, True, True]
        new.write_bytes(b"another's")
        # the old inode may be given out again
        mpi_files.remove_segments({segment._replace(inode=segment.inode + 10**6) for segment in found}, since)
        assert new.exists()
    finally:
        for path in files:
            path.unlink(missing_ok=True)


CHILD = """
import mmap, os, pathlib, sys, time
from mpitrain.elastic.marks import Marks, starting
starting()
base = os.environ["PRTE_MCA_prte_tmpdir_base"]
assert base == os.environ["OMPI_MCA_orte_tmpdir_base"]
pathlib.Path(base, "ompi.17").mkdir()
with open(sys.argv[2], "a") as file:
    print(base, file=file)
with open(sys.argv[3], "rb") as file:
    tokens = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
marks = Marks(pathlib.Path(sys.argv[1]), active=True)
marks.begin()
for step in range(4):
    marks.alive("training", step)
    time.sleep(0.3)
if pathlib.Path(sys.argv[2]).read_text().count("\\n") == 2:
    marks.done("finished", 4)
sys.exit(1)
"""


def test_a_supervisor_removes_what_its_launches_made_and_says_so(place: Path) -> None:
    mine = place / "project/ompi.70007"
    mine.mkdir(parents=True)
    (mine / "tokens.bin").write_bytes(bytes(8192))
    (place / "temporary").mkdir()
    words = [sys.executable, "-m", "mpitrain", "elastic", "--run", "run", "--pause", "0.1", "--"]
    words += [sys.executable, "-c", CHILD, "run", "bases", str(mine / "tokens.bin")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place / "temporary")} | dict.fromkeys(VARIABLES, "")
    result = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr
    first, second = (place / "bases").read_text().split("\n")[:2]
    assert first != second and Path(first).parent == place / "temporary"
    lines = result.stderr.splitlines()
    assert [line for line in lines if "removed" in line] == [
        f"elastic: removed mpirun's folder {folder} on this host" for folder in (first, second)
    ], result.stderr
    assert lines[-1] == "elastic: the run is finished after step 4", "the last line about a launch says how it ended"
    assert list((place / "temporary").iterdir()) == []
    assert (mine / "tokens.bin").exists()
