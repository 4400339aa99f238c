"""The folders of mpirun, and the shared memory of MPI: where they are made, what is removed, and what must not be."""

import mmap
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT

from mpitrain.job.elastic.supervisor import scripts
from mpitrain.job.elastic.supervisor.agents import Answer, clean, parse_agent, probe
from mpitrain.job.elastic.supervisor.mpi_files import segments
from mpitrain.job.elastic.supervisor.mpi_files.sessions import (
    PLACE_PREFIX,
    VARIABLES,
    CleanedFolders,
    SessionFolder,
    Sessions,
    make,
)
from mpitrain.job.elastic.supervisor.words import parse
from mpitrain.job.record.files.marks import SUPERVISOR_VARIABLE

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
        (["mpirun", "--tune", "site.conf", "a"], "openmpi", {}),
        (["mpirun", "--am=no.conf,site.conf", "a"], "openmpi", {}),
        (["mpirun", "a"], "openmpi", {"PRTE_MCA_prte_remote_tmpdir_base": "/scratch"}),
        (["mpirun", "a"], "openmpi", {"OMPI_MCA_mca_base_param_files": "no.conf:site.conf"}),
        (["mpirun", "a"], "openmpi", {"OMPI_MCA_mca_base_envar_file_prefix": "site.conf"}),
        (["mpirun", "a"], "openmpi", {"HOME": "home"}),
        (["site/bin/mpirun", "a"], "openmpi", {}),
        (["usual/mpirun", "a"], "openmpi", {}),  # a link to it
        (["mpirun", "a"], "openmpi", {PRTE: "/nonexistent/folder"}),
    ],
)
def test_a_place_that_the_user_has_set_otherwise_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], kind: str, environ: dict[str, str]
) -> None:
    monkeypatch.chdir(place)
    for name in ("home/.prte", "site/etc", "site/bin", "usual"):
        (place / name).mkdir(parents=True)
    (place / "home/.prte/mca-params.conf").write_text("# of the site\nprte_local_tmpdir_base = /scratch\n")
    (place / "site/etc/openmpi-mca-params.conf").write_text("orte_local_tmpdir_base=/scratch\n")
    (place / "site.conf").write_text("-mca a b -mca prte_local_tmpdir_base /scratch\n")
    (place / "no.conf").write_text("# prte_local_tmpdir_base = /scratch\nprte_tmpdir_base_x = 1\n")
    (place / "site/bin/mpirun").write_text("#!/bin/sh\n")
    (place / "site/bin/mpirun").chmod(0o755)
    (place / "usual/mpirun").symlink_to(place / "site/bin/mpirun")
    assert make(parse(words, kind), {"TMPDIR": str(place), **environ}) is None  # type: ignore[arg-type]
    assert make(OPEN_MPI, {"TMPDIR": str(place), "OMPI_MCA_mca_base_param_files": "no.conf"}) is not None


@pytest.mark.parametrize(
    ("kind", "hosts", "environ", "is_in_tmpdir"),
    [
        ("openmpi", ["localhost"], {}, True),
        ("openmpi", ["localhost", "far"], {}, False),
        ("openmpi", [], {"LSB_JOBID": "7"}, False),  # mpirun alone knows the hosts
        ("other", [], {}, False),  # a script: nobody knows them
    ],
)
def test_other_hosts_may_lack_the_temporary_folder_of_this_one(
    place: Path, kind: str, hosts: list[str], environ: dict[str, str], is_in_tmpdir: bool
) -> None:
    for tmpdir in (str(place), "/proc"):
        session = make(parse(OPEN_MPI.words(), kind), environ | {"TMPDIR": tmpdir}, hosts)  # type: ignore[arg-type]
        assert session is not None
        Path(session.folder).rmdir()
        usual = Path(session.folder).parent in (Path("/tmp"), Path("/var/tmp"))
        assert usual == (not is_in_tmpdir or tmpdir == "/proc")
    site = place / "site"
    for name in ("bin", "etc"):
        (site / name).mkdir(parents=True)
    (site / "bin/mpirun").write_text("#!/bin/sh\n")
    (site / "bin/mpirun").chmod(0o755)
    for text in ("# no host\n\n", "# hosts\n n1 slots=4\n"):  # those that mpirun takes by itself
        (site / "etc/prte-default-hostfile").write_text(text)
        session = make(parse([str(site / "bin/mpirun"), "a"], "openmpi"), {"TMPDIR": str(place)})
        assert session is not None
        Path(session.folder).rmdir()
        assert (Path(session.folder).parent == place) == ("n1" not in text)
    # what the user says is for all hosts
    session = make(OPEN_MPI, {"TMPDIR": "/proc", PRTE: str(place)}, ["far"])
    assert session is not None and Path(session.folder).parent == place


def test_no_folder_is_made_in_that_of_another_launch(place: Path) -> None:
    """A program that a rank has started may outlive the rank's job, and then has the names of that job's folder in its environment."""
    outer = make(OPEN_MPI, {PRTE: str(place)})
    assert outer is not None
    inner = make(OPEN_MPI, dict.fromkeys(VARIABLES, outer.folder))
    assert inner is not None and Path(inner.folder).parent == place
    far = make(OPEN_MPI, {PRTE: outer.folder, "TMPDIR": str(place)}, ["far"])
    assert far is not None and Path(far.folder).parent in (Path("/tmp"), Path("/var/tmp")), "TMPDIR of the outer's host"
    Path(far.folder).rmdir()
    several = place / f"{PLACE_PREFIX}x"
    several.mkdir()
    inner = make(OPEN_MPI, dict.fromkeys(VARIABLES, str(several)))
    assert inner is not None and Path(inner.folder).parent == several


def begun(place: Path) -> SessionFolder:
    """A folder with what a killed mpirun has left."""
    session = make(OPEN_MPI, {"TMPDIR": str(place)})
    assert session is not None
    for name in ("ompi.17/1", "prted.18"):
        Path(session.folder, name).mkdir(parents=True)
    Path(session.folder, "ompi.17/hwloc.sm").touch()
    return session


def cleaned(*sessions: SessionFolder, host: str = "localhost") -> CleanedFolders:
    agent = parse_agent("sh -c 'eval \"$2\"' agent")  # of the words that follow, the second is the script
    return clean(agent, [host], sessions, 20.0, {})[host].folders


@pytest.mark.parametrize("host", ["localhost", "far"])
def test_only_the_folder_of_the_launch_is_removed(place: Path, host: str) -> None:
    mine, other = begun(place), begun(place)
    user = place / "ompi.70007"
    user.mkdir()
    assert cleaned(mine, SessionFolder(f"{place}/none", "1:1"), host=host).kept == set()
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
    assert cleaned(linked, swapped, kept) == CleanedFolders(frozenset(), frozenset({2}))
    for folder in (victim / "ompi.1", Path(swapped.folder, "ompi.1"), Path(kept.folder, "thesis.tex")):
        assert folder.exists()


@pytest.mark.rest
def test_the_folder_of_a_living_mpirun_is_not_removed(place: Path) -> None:
    """Such as one that a rank has started, with the variables of the launch. Nothing is lost with an empty one."""
    session, empty = begun(place), make(OPEN_MPI, {PRTE: str(place)})
    assert empty is not None
    env = {**os.environ, ORTE: session.folder, PRTE: empty.folder}
    with subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE) as inner:
        assert cleaned(session, empty) == CleanedFolders(frozenset({1}), frozenset({0}))
        assert Path(session.folder, "ompi.17/hwloc.sm").exists()
        inner.communicate()
    assert cleaned(session) == CleanedFolders(frozenset({0}))
    assert list(place.iterdir()) == []


@pytest.mark.rest
def test_a_host_answers_at_once_whatever_stays_on_it(place: Path) -> None:
    """As after launches of which a process hangs in the kernel. Those that end in a moment are waited for once."""
    stuck = [begun(place) for _ in range(3)]
    ends = begun(place)
    started = []
    for session in stuck:
        started.append(subprocess.Popen(["cat"], env={**os.environ, PRTE: session.folder}, stdin=subprocess.PIPE))
    started.append(subprocess.Popen(["sleep", "0.4"], env={**os.environ, ORTE: ends.folder}))
    try:
        began = time.monotonic()
        assert cleaned(ends, *stuck) == CleanedFolders(frozenset({0}), frozenset({1, 2, 3}))
        first_s = time.monotonic() - began
        assert first_s > 0.4
        for session in stuck:
            session.kept = {"this host"}
        began = time.monotonic()
        assert cleaned(*stuck) == CleanedFolders(kept=frozenset({0, 1, 2}))
        assert time.monotonic() - began < first_s - 0.4, "no moment for what has stayed"
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
    assert cleaned(*stuck) == CleanedFolders(frozenset({0, 1, 2}))


@pytest.mark.rest
@pytest.mark.parametrize("grep", ["exit 127", "case $* in *z*) exit 2 ;; esac"])
def test_without_a_grep_that_can_tell_a_folder_is_in_use(
    place: Path, monkeypatch: pytest.MonkeyPatch, grep: str
) -> None:
    session = begun(place)
    (place / "bin").mkdir()
    (place / "bin/grep").write_text(f"#!/bin/sh\n{grep}\n")
    (place / "bin/grep").chmod(0o755)
    monkeypatch.setenv("PATH", str(place / "bin"), prepend=":")
    assert cleaned(session) == CleanedFolders(kept=frozenset({0}))
    assert Path(session.folder, "ompi.17/hwloc.sm").exists()


def test_variables_of_the_user_do_not_get_into_the_answer_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("num", "removed", "kept", "found", "folder"):
        monkeypatch.setenv(name, "abc")
    assert probe(parse_agent("false"), ["localhost"], 10.0, {}) == ["localhost"]
    assert clean(parse_agent("false"), [], [], 10.0, {}) == {"localhost": Answer(0)}


def test_a_folder_stays_on_the_list_until_it_is_removed(place: Path) -> None:
    sessions = Sessions()
    settings = sessions.begin(OPEN_MPI, {PRTE: str(place)}, ["localhost", "far1", "far2", "far3"])
    assert set(settings) == set(VARIABLES)
    (folder,) = set(settings.values())
    gone, kept = CleanedFolders(frozenset({0})), CleanedFolders(kept=frozenset({0}))
    first = {"localhost": gone, "far1": gone, "far2": kept}
    assert sessions.settle(first) == [f"removed mpirun's folder {folder} on this host, far1"]
    assert sessions.hosts() == {"far2", "far3"}
    reason = "it has other files, or a living process has its name in the environment"
    assert list(sessions.remaining()) == [
        f"mpirun's folder {folder} stays on far2: {reason}",
        f"mpirun's folder {folder} may stay on far3: not reached",
    ]
    assert sessions.settle({"localhost": CleanedFolders(), "far2": gone}) == [
        f"removed mpirun's folder {folder} on far2"
    ]
    assert sessions.settle({"far3": CleanedFolders()}) == []
    assert sessions.left == [] == list(sessions.remaining())


@pytest.mark.parametrize(
    ("words", "is_elastic"),
    [
        ("--train.elastic", True),
        ("--train.elastic=TRUE --train.steps 3", True),
        ("train --config no.toml --train.elastic", True),
        ("--config elastic.toml", True),
        ("--config=inline.toml", True),
        ("--config elastic.toml --train.no-elastic", False),
        ("--config elastic.toml --train.elastic=false", False),
        ("--train.elastic true --train.elastic false", False),
        ("--config no.toml", False),
        ("--config elsewhere.toml", False),
        ("--config pipe", False),
        ("--config none", False),
        ("--run elastic", False),
        ("--train.elastic true --train.nothing 1", False),  # as the ranks will say
        ("--train.elastic --help", False),
    ],
)
def test_scripts_understand_words_as_the_program_does(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, is_elastic: bool
) -> None:
    monkeypatch.chdir(place)
    (place / "elastic.toml").write_text("[train]\nelastic = true\n")
    (place / "inline.toml").write_text('train = { "elastic" = true }\n')
    (place / "no.toml").write_text("[train]\nelastic = false\n")
    (place / "elsewhere.toml").write_text("run = '''\nelastic = true'''\n")
    os.mkfifo(place / "pipe")
    scripts.main("is-elastic", *words.split())
    assert capsys.readouterr().out == "true\n" * is_elastic


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
            found = segments.find_segments(f"me-{number}")
            assert {segment.path for segment in found} == {str(path) for path in (old, new, used)}
            segments.remove_segments(found, since)
            assert all(path.exists() for path in files), "the job still has them mapped"
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            file.close()
            segments.remove_segments(found, since)
        assert [path.exists() for path in files] == [True, False, True, True]
        # A process may open a file while it is asked whether one has it open: the kernel then sends a signal.
        with new.open("wb") as writes, new.open("rb") as same, used.open("rb") as asked:
            assert not segments._is_unused(same.fileno()) and segments._is_unused(asked.fileno())
            writes.write(b"another's")
            with pytest.raises(BlockingIOError):
                os.open(used, os.O_WRONLY | os.O_NONBLOCK)
        # the old inode may be given out again
        segments.remove_segments({segment._replace(inode=segment.inode + 10**6) for segment in found}, since)
        assert new.exists()
    finally:
        for path in files:
            path.unlink(missing_ok=True)


CHILD = """
import mmap, os, pathlib, sys, time
from mpitrain.job.record.files.marks import Marks, starting
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
    env = {**os.environ, "PYTHONPATH": str(ROOT), PRTE: str(place / "temporary"), ORTE: ""}
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
