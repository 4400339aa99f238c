"""./mpirun/setup, train and test themselves. train runs a stand-in for mpitrain here, so it is the script that is tested."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from extent import FULL, extent
from launching import ROOT, Result, clean_environment, is_open_mpi, run, session_processes
from packaging.utils import canonicalize_name

from mpitrain.job.elastic.supervisor.mpi_files.sessions import VARIABLES

# What a rank does about signals, as mpitrain does: a handler first, then one look for an earlier request.
STAND_IN = """
import os, signal, sys, time
if "--slow" in sys.argv:
    print("starting", flush=True)
    time.sleep(1)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"record\\n"))
if os.path.exists(os.environ["MPITRAIN_STOP_FILE"]):
    asked.append(1)
from mpi4py import MPI
world = MPI.COMM_WORLD
print(f"ready {world.rank} of {world.size} {sys.argv[1:]} tty={os.environ['MPITRAIN_TTY']}", flush=True)
deadline, parent = time.monotonic() + 30, os.getppid()
while not world.allreduce(len(asked)) and time.monotonic() < deadline:
    time.sleep(0.02)
    if os.getppid() != parent:
        os._exit(1)  # mpirun was killed
while "--stubborn" in sys.argv:
    time.sleep(0.1)
if asked or world.size > 1 and time.monotonic() < deadline:
    print(f"checkpoint {world.rank}", flush=True)
world.barrier()
sys.exit(7 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose set-up is done: our scripts, this environment, and a folder `mpitrain` with a stand-in for the program."""
    (tmp_path / "mpirun").mkdir()
    for name in ("train", "test", "lib.sh"):
        shutil.copy(ROOT / "mpirun" / name, tmp_path / "mpirun" / name)
    setup = tmp_path / "mpirun/setup"
    setup.write_text("#!/bin/sh\n")
    setup.chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "mpitrain").mkdir()
    (tmp_path / "mpitrain/__init__.py").write_text(f"__path__.append({str(ROOT / 'mpitrain')!r})\n")
    (tmp_path / "mpitrain/__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def train(checkout: Path, *args: str, **options: object) -> Result:
    return run([checkout / "mpirun/train", *args], cwd=checkout, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("request_stop", [signal.SIGINT, *extent([], [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])])
def test_a_signal_to_train_lets_the_ranks_save_and_end(checkout: Path, request_stop: signal.Signals) -> None:
    result = train(checkout, "--a", "b c", when="ready 1", send=request_stop)
    assert result.returncode == 0, str(result)
    assert "ready 0 of 2 ['--a', 'b c'] tty=0" in result.stdout, str(result)
    # counted, not compared by lines: MPICH's mpirun may join lines of two ranks
    assert [result.stdout.count(f"checkpoint {rank}") for rank in range(2)] == [1, 1], str(result)


# from before mpirun is there, over the ranks' start, to after it
@pytest.mark.parametrize("after_s", extent([0.1, 0.3], [0.1, 0.2, 0.3, 0.5, 0.8]))
def test_a_signal_while_the_ranks_start_is_not_lost(checkout: Path, after_s: float) -> None:
    result = train(checkout, after_s=after_s, send=signal.SIGTERM)
    # before train has its own handler the signal ends it, as any script
    assert result.returncode == 0 or (result.returncode == -signal.SIGTERM and not result.stdout), str(result)
    assert result.returncode != 0 or "checkpoint 0" in result.stdout, str(result)


@pytest.mark.rest
def test_a_signal_before_the_ranks_have_a_handler_is_not_lost(checkout: Path) -> None:
    result = train(checkout, "--slow", when="starting", send=signal.SIGINT)
    assert result.returncode == 0, str(result)
    assert "checkpoint 0" in result.stdout, str(result)


@pytest.mark.skipif(not is_open_mpi(), reason="MPICH's mpirun does not pass SIGUSR2 on")
def test_train_passes_on_sigusr2(checkout: Path) -> None:
    command = [checkout / "mpirun/train"]
    with subprocess.Popen(command, cwd=checkout, env=clean_environment(), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert {job.stdout.readline()[:7] for _ in range(2)} == {"ready 0", "ready 1"}
        job.send_signal(signal.SIGUSR2)
        assert [job.stdout.readline() for _ in range(2)] == ["record\n", "record\n"]
        job.send_signal(signal.SIGTERM)
        assert "checkpoint 0" in job.communicate(timeout=30)[0]
        assert job.returncode == 0


def test_train_returns_the_exit_code_of_the_ranks(checkout: Path) -> None:
    result = train(checkout, "-np", "3", "--fail", when="ready 2", send=signal.SIGTERM)
    assert result.returncode == 7, str(result)


@pytest.mark.parametrize("is_killed", extent([True], [False, True]))
def test_train_leaves_nothing_in_the_temporary_folder_and_takes_nothing_from_it(
    checkout: Path, is_killed: bool
) -> None:
    """A folder is named as one of Open MPI's mpiruns of which no process lives here; it is a user's, or another container's."""
    folder = checkout / "a temporary one"
    (folder / "ompi.20241127").mkdir(parents=True)
    (folder / "ompi.20241127/thesis.tex").touch()
    env = {**clean_environment(), "TMPDIR": str(folder)}
    words = [checkout / "mpirun/train", "-n", "1"]
    with subprocess.Popen(words, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline()[:7] == "ready 0"
        left = list(folder.glob("mpitrain-mpi-*/ompi.*"))
        assert len(left) == is_open_mpi()
        if is_killed and left:
            os.kill(int(left[0].suffix[1:]), signal.SIGKILL)  # mpirun
        else:
            job.send_signal(signal.SIGTERM)
        job.communicate(timeout=30)
    assert job.returncode == (137 if is_killed and left else 0)
    assert [path.name for path in sorted(folder.rglob("*"))] == ["ompi.20241127", "thesis.tex"]


@pytest.mark.rest
def test_ctrl_c_at_a_terminal_saves_and_a_second_one_ends_at_once(checkout: Path) -> None:
    """With a real terminal, as the kernel then sends SIGINT to all of the terminal's foreground group."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(checkout)
        os.execve(checkout / "mpirun/train", ["train", "--stubborn"], clean_environment())
    printed = read_until(terminal, b"ready 1")
    assert b"tty=1" in printed
    ranks = [other for other in descendants(pid) if b"mpitrain" in Path(f"/proc/{other}/cmdline").read_bytes()]
    assert len(ranks) >= 2
    sessions = {os.getsid(other) for other in ranks}
    os.write(terminal, b"\x03")
    read_until(terminal, b"stopping")
    time.sleep(1.0)
    assert all(Path(f"/proc/{other}").exists() for other in ranks), "one Ctrl-C must not end the ranks"
    start = time.monotonic()
    os.write(terminal, b"\x03")
    read_until(terminal, b"ending now")
    read_until(terminal, None)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) != 0
    assert time.monotonic() - start < 15
    deadline = time.monotonic() + 5
    while any(session_processes(session) for session in sessions) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [session_processes(session) for session in sessions] == [[]] * len(sessions)
    os.close(terminal)


def read_until(terminal: int, text: bytes | None) -> bytes:
    """What the terminal shows, up to `text` or (None) to its end."""
    shown = b""
    while text is None or text not in shown:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # the other side was closed
            chunk = b""
        if not chunk:
            assert text is None, f"{text!r} did not appear in {shown!r}"
            break
        shown += chunk
    return shown


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, which may be in other sessions."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below = [pid]
    for parent in below:
        below += [child for child, its_parent in parents.items() if its_parent == parent]
    return below[1:]


@pytest.mark.parametrize("ranks", ["0", "x", "-1", ""])
def test_train_refuses_what_is_no_number_of_ranks(checkout: Path, ranks: str) -> None:
    result = train(checkout, "-np", ranks)
    assert result.returncode == 1, str(result)
    assert result.stderr == f"train: -np wants a number of ranks from 1, not '{ranks}'\n"


@pytest.mark.parametrize(
    ("kind", "set_before", "after"),
    [("openmpi", {}, "^ofi"), ("openmpi", {"OMPI_MCA_btl": "self,sm"}, "self,sm"), ("system", {}, "unset")],
)
def test_the_transports_of_open_mpi(kind: str, set_before: dict[str, str], after: str) -> None:
    """Ours for PyPI's, whose start would take a second more; what the caller says stays, and what a machine's own MPI is set to."""
    script = '. "$1"; mpi_kind=$2; mpi_environment 2; echo "${OMPI_MCA_btl-unset}"'
    result = run(["bash", "-c", script, "bash", ROOT / "mpirun/lib.sh", kind], env=set_before)
    assert (result.returncode, result.stdout) == (0, after + "\n"), str(result)


@pytest.mark.skipif(not is_open_mpi(), reason="MPICH's mpirun makes no folder")
def test_mpirun_gets_a_folder_that_is_removed_after_it(tmp_path: Path) -> None:
    script = (
        '. "$1"; load_mpi; make_session; "${in_session[@]}" env | grep tmpdir_base; mkdir -p "${session[1]}/ompi.1/2"\n'
    )
    script += (
        'remove_session; make_session; touch "${session[1]}/thesis.tex"; remove_session; ! env | grep tmpdir_base\n'
    )
    env = {"TMPDIR": str(tmp_path)} | dict.fromkeys(VARIABLES, "")
    result = run(["bash", "-euc", script, "lib", ROOT / "mpirun/lib.sh"], env=env)
    lines = [line.partition("=") for line in result.stdout.splitlines()]
    assert {name for name, _, _ in lines} == set(VARIABLES), str(result)
    folders = {Path(value) for _, _, value in lines if value}
    assert {folder.parent for folder in folders} == {tmp_path} and len(folders) == 1, str(result)
    (kept,) = tmp_path.iterdir()
    assert [file.name for file in kept.iterdir()] == ["thesis.tex"] and kept not in folders
    assert result.stderr == (
        f"lib: mpirun's folder {kept} stays on this host: it has other files, or a living process has its name in the environment\n"
    )


@pytest.mark.rest
@pytest.mark.skipif(not is_open_mpi(), reason="ULFM is a part of Open MPI")
@pytest.mark.parametrize(
    ("words", "survives"),
    [
        (["--train.elastic", "true"], True),
        (["--config", "elastic.toml"], True),
        (["--config", "elastic.toml", "--train.elastic", "false"], False),
    ],
)
def test_an_elastic_run_gets_an_mpi_that_survives(tmp_path: Path, words: list[str], survives: bool) -> None:
    (tmp_path / "elastic.toml").write_text("[train]\nsteps = 5\nelastic = true\n")
    script = '. "$1"; load_mpi; shift; survive_options "$@"; echo "${survive[*]}"'
    result = run(["bash", "-euc", script, "bash", ROOT / "mpirun/lib.sh", *words], cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "--with-ft ulfm\n" if survives else "\n"), str(result)


def test_elastic_keeps_a_signal_for_the_supervisor_until_that_listens(checkout: Path) -> None:
    """It waits in the kernel; where env cannot block signals, a variable tells of one during the setup."""
    shutil.copy(ROOT / "mpirun/elastic", checkout / "mpirun/elastic")
    (checkout / "mpitrain/__main__.py").write_text(
        "import os, signal, sys\n"
        "asked = os.environ.get('MPITRAIN_STOP_ASKED')\n"
        "if asked is None and 'early' in sys.argv: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "from mpitrain.job.elastic.supervisor.requests import SignalRequests\n"
        "print(asked, SignalRequests().stop, signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    for early, line, when, said in (
        ("", "echo sets up; sleep 0.3", "sets up", f"None {signal.SIGUSR1:d} set()"),
        ("old", "echo sets up; sleep 0.3", "sets up", f"1 {signal.SIGUSR1:d} set()"),
        ("early", "echo sets up", None, f"None {signal.SIGUSR1:d} set()"),
        ("none", "echo sets up", None, "None 0 set()"),
    ):
        (checkout / "mpirun/setup").write_text(f"#!/bin/sh\n{line}\n")
        signals = {"when": when, "send": signal.SIGUSR1} if when else {}
        (checkout / "env").write_text('#!/bin/sh\ncase $1 in --block*) exit 125 ;; esac\nexec /usr/bin/env "$@"\n')
        (checkout / "env").chmod(0o755 if early == "old" else 0o644)
        path = {"PATH": f"{checkout}:{os.environ['PATH']}"}
        result = run([checkout / "mpirun/elastic", "-np", "1", "--", early], env=path, **signals)  # type: ignore[arg-type]
        assert (result.returncode, result.stdout) == (0, f"sets up\n{said}\n"), str(result)


def test_a_signal_to_all_processes_of_train_lets_it_set_up_and_the_ranks_stop(checkout: Path) -> None:
    """As by qsig. It comes twice: while setup runs, and while the script asks Python for the folder of mpirun."""
    (checkout / "mpirun/setup").write_text("#!/bin/sh\nkill -s USR1 0\nsleep 0.1\nkill -s USR2 $$\n")
    (checkout / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'mpitrain.job.elastic.supervisor.scripts' in sys.orig_argv: os.killpg(0, signal.SIGUSR1)\n"
    )
    with subprocess.Popen(
        [checkout / "mpirun/train", "-np", "1"], cwd=checkout, env=clean_environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as job:  # fmt: skip
        said = job.communicate(timeout=30)
    assert job.returncode == 0 and "checkpoint 0" in said[0], said


def test_signals_of_slurm_wait_for_the_ranks(checkout: Path) -> None:
    """They reach ranks that srun has started before these listen."""
    program = (
        "import os, signal\n"
        "for name in ('SIGUSR2', 'SIGUSR1', 'SIGTERM'): os.kill(os.getpid(), getattr(signal, name))\n"
        "from mpitrain.job.train import stop\n"
        "stop.listen(); print(stop.requested(), signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    script = '. "$1"; load_mpi; srun_rank_words; exec "${as_rank[@]}" "$venv/bin/python" -c "$2"'
    words = ["bash", "-euc", script, "bash", checkout / "mpirun/lib.sh", program]
    result = run(words, env={"SLURM_STEP_NUM_TASKS": "1"})
    assert (result.returncode, result.stdout) == (0, "True set()\n"), str(result)


@pytest.mark.skipif(not is_open_mpi(), reason="srun --mpi=pmix starts the ranks of Open MPI")
@pytest.mark.parametrize("early", [False, True])
def test_a_batch_script_starts_the_ranks_by_srun_unless_it_is_asked_to_stop_before(checkout: Path, early: bool) -> None:
    (srun := checkout / "srun").write_text(
        f"""#!/bin/sh
        [ "$*" = --mpi=list ] || exec echo "ranks: $SRUN_CPUS_PER_TASK $*"
        set -- $(cat /proc/$$/stat)
        {"kill -s USR1 $5" if early else ""} # the process that leads the group: the script
        echo pmix
        """
    )
    srun.chmod(0o755)
    env = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "3",
        "PATH": f"{checkout}:{os.environ['PATH']}",
    }
    result = run(["bash", ROOT / "examples/slurm/train.sbatch", "--run", "a"], cwd=checkout, env=env)
    words = "ranks: 3 --mpi=pmix --export=ALL sh -c trap '' USR1 USR2; exec \"$@\" sh"
    words += f" env --block-signal=USR1,TERM {checkout}/.venv/bin/python -P -m mpitrain"
    assert (result.returncode, result.stdout) == (0, "" if early else f"{words} --run a\n"), str(result)
    assert (result.stderr == "stopped before the start, as asked\n") == early, str(result)


def test_test_refuses_an_unknown_part(checkout: Path) -> None:
    result = run([checkout / "mpirun/test", "units"], cwd=checkout)
    assert result.returncode == 1, str(result)
    assert "expected lint, types, unit, mpi, mpich, launch or docs" in result.stderr


def test_test_says_which_part_failed_and_runs_the_others(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    bodies = {
        "unit": "False",
        "unit/ckpt": "True",
        "mpi": "True",
        "launch": "False",
        "launch/mpitrain": "True",
        "docs": "True",
    }
    for folder, value in bodies.items():
        (checkout / "tests" / folder).mkdir(parents=True)
        (checkout / "tests" / folder / f"test_{Path(folder).name}.py").write_text(
            f"def test_a():\n    assert {value}\n"
        )
    for folder in ("fuzz", "unit/data"):
        (checkout / "tests" / folder).mkdir()
    result = run(
        [checkout / "mpirun/test", "unit", "mpi", "launch", "docs"], cwd=checkout, env={"MPITRAIN_TEST_NP": "1"}
    )
    assert result.returncode == 1, str(result)
    assert (result.stdout.count("1 failed in"), result.stdout.count("1 passed in")) == (2, 4), str(result)
    at_the_end = result.stdout.rpartition("1 passed in")[2]
    assert at_the_end.count("E       assert False") == at_the_end.count("\nFAILED tests/") == 2, str(result)
    assert re.search(
        r"^test: part 3 of 4: launch, after 0 min \d+ s(; beside it: .*)?$", result.stderr, re.MULTILINE
    ), str(result)
    assert re.search(r"test: FAILED after 0 min \d+ s: unit of the rest,launch\n$", result.stderr), str(result)


LEVELS = """
import pytest

@pytest.mark.rest
def test_slow():
    assert False

def test_quick():
    pass
"""


def test_levels_and_the_command_for_one_test_again(checkout: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", checkout)
    for name in ("tests/conftest.py", "tests/helpers/extent.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "tests/unit").mkdir()
    (checkout / "tests/fuzz").mkdir()
    (checkout / "tests/unit/test_two.py").write_text(LEVELS)

    def tests(*words: str) -> Result:
        return run([checkout / "mpirun/test", *words], cwd=checkout)

    core, rest = tests("unit"), tests("rest", "unit")
    assert core.returncode == 0 and "1 passed, 1 deselected in" in core.stdout, str(core)
    assert rest.returncode == 1 and "1 failed, 1 deselected in" in rest.stdout, str(rest)
    again = "./mpirun/test tests/unit/test_two.py::test_slow"
    assert f"\nagain: {again}\n" in rest.stdout.rpartition("what failed")[2], str(rest)
    result = tests(*again.split()[1:])
    assert result.returncode == 1 and "1 failed in" in result.stdout, str(result)


def test_setup_refuses_an_old_python(checkout: Path) -> None:
    for name in ("setup", "hdf5.sh", "pip_settings.py"):
        shutil.copy(ROOT / "mpirun" / name, checkout / "mpirun" / name)
    (checkout / ".venv").unlink()
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout / name)
    python = checkout / "python3.9"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 || exit 1\n')
    python.chmod(0o755)
    result = run([checkout / "mpirun/setup"], env={"PYTHON": str(python)})
    assert result.returncode == 1, str(result)
    assert "Python 3.11 or later is needed" in result.stderr
    assert "Python 3.9.2" in result.stderr


def test_setup_refuses_an_unknown_part() -> None:
    result = run([ROOT / "mpirun/setup", "tests"])
    assert (result.returncode, result.stdout) == (1, ""), str(result)
    assert result.stderr == "setup: there is no part 'tests': expected train, hdf5 or test\n"


made_by_setup = pytest.mark.skipif(
    not (ROOT / ".venv/stamps/test").exists(), reason="this .venv was not made by ./mpirun/setup test"
)


@made_by_setup
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_second_setup_costs_under_a_second(part: str) -> None:
    run([ROOT / "mpirun/setup", part], timeout_s=110)
    result = run([ROOT / "mpirun/setup", part])
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), str(result)
    assert result.seconds < 1.0


@pytest.mark.rest
@made_by_setup
def test_pip_would_install_what_uv_installed(tmp_path: Path) -> None:
    """uv has to look where pip is configured to look, and to take the same versions."""
    report = tmp_path / "report.json"
    torch = f"torch=={version('torch')}"  # the build that setup chose
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report]
    pip = run([*command, "--constraint", ROOT / "constraints.txt", torch, f"{ROOT}[dev,openmpi]"], timeout_s=100)
    assert pip.returncode == 0, str(pip)
    taken = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    by_pip = {(canonicalize_name(package["name"]), package["version"]) for package in taken}
    installed = {(canonicalize_name(package.name), package.version) for package in distributions()}
    assert {name for name, _ in by_pip} >= {"torch", "h5py", "jax"}
    assert by_pip - installed == set()


FAILS = """
import sys, time
import collectives
comm = collectives.world()
if sys.argv[1] == "on all ranks":
    with comm.together():
        raise ValueError("of all ranks")
if comm.rank == comm.size - 1:
    raise KeyError("of one rank")
comm.barrier()
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    "which", extent(["of one rank", "of a job of one"], ["of one rank", "of a job of one", "on all ranks"])
)
def test_the_report_of_a_failure_is_the_last_text_of_train(checkout: Path, which: str) -> None:
    (checkout / "mpitrain/__main__.py").write_text(FAILS)
    result = train(checkout, "-np", "1" if which == "of a job of one" else "2", which)
    assert result.returncode == 1, str(result)
    before, _, last = result.stderr.rpartition("train: the job has failed:\n")
    message = "ValueError: of all ranks" if which == "on all ranks" else "KeyError: 'of one rank'"
    assert message in before, "also before the lines of mpirun"
    who = "" if which == "of a job of one" else r"rank \d on \S+ \(process \d+\) ends by an uncaught \w+\n"
    words = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\n{who}Traceback \(most recent call last\):\n"
    assert re.match(words, last) and last.endswith(f"\n{message}\n"), str(result)


@pytest.mark.skipif(not FULL, reason="waits for mpirun for ten seconds: in a full run")
def test_train_ends_an_mpirun_that_does_not_end_after_a_failure(checkout: Path) -> None:
    """As Open MPI's does when a host is silent."""
    (checkout / "mpitrain/__main__.py").write_text(
        "import os, time\nopen(os.environ['MPITRAIN_FAILURE_FILE'], 'w').write('host2 is silent\\n')\ntime.sleep(100)\n"
    )
    result = train(checkout, "-np", "1", timeout_s=50)
    assert result.returncode != 0 and 10 < result.seconds < 30, str(result)
    assert result.stderr.endswith("train: the job has failed:\nhost2 is silent\n"), str(result)


@pytest.mark.parametrize("script", ["setup", "test", "pack"])
def test_the_comment_at_the_top_of_a_script_is_its_help(script: str) -> None:
    """Printed at once, before anything is set up."""
    result = run([ROOT / "mpirun" / script, "--help"], timeout_s=10)
    assert (result.returncode, result.stderr) == (0, ""), str(result)
    assert result.stdout.startswith("Sets up what is missing") and f"  ./mpirun/{script} " in result.stdout, str(result)
    assert "set -euo" not in result.stdout and not re.search("^#", result.stdout, re.MULTILINE)
