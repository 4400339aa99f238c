"""`python -m mpitrain elastic` with real jobs: mpirun killed, a host lost, a hang, wrong settings, stops, and its last words."""

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import need_namespaces
from launching import ROOT, YIELDS, Result, is_open_mpi, job_environment, run
from main_job import STEPS, command, losses, metrics
from run_events import faults

from mpitrain.job.elastic.supervisor.folder import VARIABLES
from mpitrain.job.record.files import marks
from mpitrain.job.record.files.folder_lock import FolderLock


def elastic(num_ranks: int, options: list[str], program: list[str], **other: object) -> Result:
    """A job of `num_ranks` under the supervisor."""
    mpirun, settings = job_environment(num_ranks)
    words = [sys.executable, "-m", "mpitrain", "elastic", *options, "--", mpirun, "-np", str(num_ranks), sys.executable]
    return run([*words, *program], env=settings | {"PYTHONPATH": str(ROOT)}, **{"timeout_s": 100, **other})  # type: ignore[arg-type]


def processes_of(folder: Path) -> dict[int, int]:
    """The processes of the jobs of a run's supervisor, with their parents."""
    mark = f"{marks.SUPERVISOR_VARIABLE}={json.loads((folder / marks.LAUNCH).read_text())['supervisor']}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def once_at_step(folder: Path, step: int, act: Callable[[], None]) -> threading.Thread:
    """Call `act` in a thread, once the run has come to a step; after 60 s not any more."""

    def wait() -> None:
        for _ in range(6000):
            alive = marks.read_alive(folder)
            if alive is not None and alive.step >= step:
                return act()
            time.sleep(0.01)
        return None

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_after_the_kill_of_mpirun_the_run_goes_on_as_if_undisturbed(
    tmp_path: Path, corpus: Path, whole_run: Callable[[int], Path]
) -> None:
    folder, killed = tmp_path / "run", []

    def kill() -> None:
        parents = processes_of(folder)
        (mpirun,) = [pid for pid, parent in parents.items() if parent not in parents]
        os.kill(mpirun, signal.SIGKILL)
        killed.append(mpirun)

    once_at_step(folder, 25, kill)
    result = elastic(2, [], command(folder, corpus))
    assert result.returncode == 0, str(result)
    assert len(killed) == 1, str(result)
    assert result.stderr.count("elastic: launch ") == 2, str(result)
    assert result.stderr.rstrip().endswith(f"elastic: the run is finished after step {STEPS}"), str(result)
    assert losses(folder) == losses(whole_run(2)), "bit for bit: the same ranks from a checkpoint"
    assert processes_of(folder) == {}
    failure, relaunch = faults(folder)
    assert (failure["event"], relaunch["event"], relaunch["launch"]) == ("failure", "relaunch", 2)
    assert 20 < relaunch["step"] <= STEPS and 0 < relaunch["cost_s"] < 60


@pytest.mark.rest
@pytest.mark.skipif(not is_open_mpi(), reason="ULFM is a part of Open MPI")
def test_a_relaunch_of_an_elastic_run_goes_on_from_copies_although_the_command_names_a_checkpoint(
    tmp_path: Path, corpus: Path, whole_run: Callable[[int], Path]
) -> None:
    folder = tmp_path / "run"
    start = whole_run(2) / "checkpoints/step-00000020"
    own = ["--resume", str(start), "--checkpoint.every", "0", "--train.elastic", "true", "--train.copy-every", "5"]
    own += ["--train.steps", "400", "--log.every", "100"]  # two seconds, so that the kill finds the run
    mpirun, settings = job_environment(2)

    def kill() -> None:
        parents = processes_of(folder)
        (launcher,) = [pid for pid, parent in parents.items() if parent not in parents]
        os.kill(launcher, signal.SIGKILL)

    once_at_step(folder, 36, kill)
    words = [sys.executable, "-m", "mpitrain", "elastic", "--", mpirun, "--with-ft", "ulfm", "-np", "2", sys.executable]
    env = settings | {"PYTHONPATH": str(ROOT)}
    result = run([*words, *command(folder, corpus, *own)], env=env, timeout_s=90)
    assert result.returncode == 0, str(result)
    assert result.stdout.count(f"goes on from {start}") == 1, str(result)
    copies = re.search(r"goes on from the copies of step (\d+) in node memory", result.stdout)
    assert copies and int(copies[1]) >= 35, str(result)
    assert [line["step"] for line in metrics(folder) if "loss" in line] == list(range(21, 401))


ON_CLUSTER = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **YIELDS}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A program for the cluster's head: starts its arguments under the supervisor, and ends rank 0's host once step 25 is done.

    The other hosts do not have, and cannot make, the folder TMPDIR of head, as it may be between nodes.
    """
    need_namespaces()
    script = tmp_path / "head.py"
    script.write_text("""
import os, pathlib, signal, subprocess, sys, time
from mpitrain.job.record.files import marks
from mpitrain.job.elastic.supervisor.mpi_files.sessions import VARIABLES
folder, *program = sys.argv[1:]
hosts = "-hosts" if "HYDRA_LAUNCHER" in os.environ else "-H"
mpirun = [os.environ["CLUSTER_MPIRUN"], hosts, os.environ["CLUSTER_HOSTS"], "-np", "2"]
env = {**os.environ, "TMPDIR": "/dev/shm/of_head"} | dict.fromkeys(VARIABLES, "")
os.mkdir(env["TMPDIR"])
for host in ("host1", "host2"):
    subprocess.run([os.environ["CLUSTER_SSH"], host, f"touch {env['TMPDIR']}"], check=True)
job = subprocess.Popen([sys.executable, "-m", "mpitrain", "elastic", "--", *mpirun, sys.executable, *program], env=env)
while job.poll() is None:
    alive = marks.read_alive(pathlib.Path(folder))
    if alive is not None and alive.step >= 25:
        room = pathlib.Path(os.environ["CLUSTER_ROOM"])
        os.kill(int((room / alive.host).read_text()), signal.SIGKILL)
        print(f"lost {alive.host}\\n", end="", flush=True)  # in one piece, beside the lines of mpirun
        break
    time.sleep(0.02)
sys.exit(job.wait())
""")
    return script


@pytest.mark.rest
def test_after_the_loss_of_a_host_the_run_goes_on_on_the_other(
    tmp_path: Path, head: Path, corpus: Path, whole_run: Callable[[int], Path]
) -> None:
    folder = tmp_path / "run"
    words = [
        ROOT / "mpirun/cluster",
        "run",
        "-H",
        "2x1",
        "--on-head",
        "--timeout",
        "90",
        "--",
        sys.executable,
        head,
        folder,
    ]
    result = run([*words, *command(folder, corpus)], cwd=ROOT, env=ON_CLUSTER, timeout_s=100)
    assert result.returncode == 0, str(result)
    assert "lost host1" in result.stdout, str(result)
    assert "elastic: launch 1 on host1:1,host2:1, 2 ranks" in result.stderr, str(result)
    assert "elastic: launch 2 on host2:1, 1 ranks" in result.stderr, str(result)
    # 2 ranks add in another order than one does
    assert losses(folder) == pytest.approx(losses(whole_run(2)), rel=1e-4)
    relaunch = faults(folder)[-1]
    assert (relaunch["event"], relaunch["hosts"]) == ("relaunch", ["host2"])
    # The lock of the dead holder is broken, so that the other host does not wait for its sign of life.
    assert "sign of life" not in result.stdout, str(result)


# What needs no training: programs that leave marks as the main job does

PROGRAM = """
import os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
from mpitrain.job.record.files.marks import Marks, launch_number, starting
starting()
folder = pathlib.Path(sys.argv[sys.argv.index("--run") + 1])
run = Marks(folder)
def stop_asked():
    return asked or os.path.exists(os.environ["MPITRAIN_STOP_FILE"])
"""


@pytest.mark.rest
def test_a_host_that_answers_again_rejoins(tmp_path: Path) -> None:
    need_namespaces()
    """The links of both hosts are down at the start. That of host2 is up once the run trains on host1 alone."""
    folder, script = tmp_path / "run", tmp_path / "head.sh"
    program = PROGRAM + (
        "step, size = 0, int(os.environ.get('OMPI_COMM_WORLD_SIZE') or os.environ['PMI_SIZE'])\n"
        "run = Marks(folder, active=os.environ.get('OMPI_COMM_WORLD_RANK') == '0' or os.environ.get('PMI_RANK') == '0')\n"
        "while size == 1 and not stop_asked():\n"
        "    step += 1; run.alive('training', step); time.sleep(0.1)\n"
        "run.done('stopped' if size == 1 else 'finished', step)\n"
    )
    options = f"--run {folder} --probe-timeout 2 --rejoin-every 0.5"
    script.write_text(
        "ip link set host1 down; ip link set host2 down; (sleep 3; ip link set host1 up) &\n"
        f"(while ! grep -q training {folder}/.alive 2>/dev/null; do sleep 0.1; done; ip link set host2 up) &\n"
        f'{sys.executable} -m mpitrain elastic {options} -- "$CLUSTER_MPIRUN" {"-H" if is_open_mpi() else "-hosts"} "$CLUSTER_HOSTS"'
        f" -np 2 {shlex.join([sys.executable, '-c', program, '--run', str(folder)])}\n"
    )
    words = [ROOT / "mpirun/cluster", "run", "-H", "2x1", "--on-head", "--timeout", "50", "--", "bash", script]
    result = run(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout_s=60)
    assert result.returncode == 0, str(result)
    said = [line for line in result.stderr.splitlines() if line.startswith("elastic: ")]
    assert said[:5] == [
        "elastic: no answer within 2 s from host1, host2",
        "elastic: expected at least 1 host, and none answers; waiting up to 600 s for more",
        "elastic: no answer within 2 s from host2",
        "elastic: launch 1 on host1:1, 1 ranks",
        "elastic: host2 can rejoin: the run saves and stops for a relaunch on more hosts",
    ], str(result)
    assert [line for line in said if "removed mpirun's folder" not in line][-2:] == [
        "elastic: launch 2 on host1:1,host2:1, 2 ranks",
        "elastic: the run is finished after step 0",
    ], str(result)
    if is_open_mpi():
        assert said[-2].startswith("elastic: removed mpirun's folder "), str(result)
        assert said[-2].endswith(" on this host, host1, host2"), str(result)


def test_the_last_text_is_the_report_and_what_follows(tmp_path: Path) -> None:
    script = PROGRAM + "(folder / 'failure.txt').write_text(f'rank 0 fell in launch {launch_number()}\\n'); sys.exit(0)"
    options = ["--max-relaunches", "1", "--run", str(tmp_path / "run")]
    result = elastic(1, options, ["-c", script, "--run", str(tmp_path / "run")], timeout_s=40)
    assert result.returncode == 1, str(result)
    assert result.stderr.splitlines()[-3:] == [
        "elastic: the report of launch 2:",
        "rank 0 fell in launch 2",
        "elastic: the job ended without its mark of completion (exit code 0); giving up after 1 relaunch without a new step",
    ], str(result)
    assert result.stderr.count("fell in launch 1") == 1, str(result)


@pytest.mark.rest
def test_a_job_that_stands_still_is_ended_and_started_again(tmp_path: Path) -> None:
    script = PROGRAM + (
        "run.alive('training', 1); run.alive('training', 2)\n"
        "if launch_number() == 1: time.sleep(60)\n"
        "run.done('finished', 3)"
    )
    folder = tmp_path / "run"
    options = ["--run", str(folder), "--step-timeout", "1"]
    result = elastic(2, options, ["-c", script, "--run", str(folder)], timeout_s=40)
    assert result.returncode == 0, str(result)
    assert "there was no sign of life after step 2 within 1 s; relaunch 1 of at most 10 now" in result.stderr, str(
        result
    )
    assert processes_of(folder) == {}
    assert not (folder / ".stop").exists()


@pytest.mark.rest
@pytest.mark.parametrize("when", ["launch 1", "trains"])
def test_a_request_to_stop_is_not_lost(tmp_path: Path, when: str) -> None:
    script = PROGRAM + (
        "time.sleep(1); run.alive('training', 0); print('trains', flush=True)\n"
        "while not stop_asked(): time.sleep(0.02)\n"
        "run.done('stopped', 7)"
    )
    folder = tmp_path / "run"
    words = ["-c", script, "--run", str(folder)]
    result = elastic(1, ["--run", str(folder)], words, when=when, send=signal.SIGTERM, timeout_s=40)
    assert result.returncode == 0, str(result)
    assert result.stderr.rstrip().endswith(
        "elastic: saved and stopped after step 7; the same command goes on from there"
    )


def test_a_limit_of_time_that_comes_in_a_pause_queues_the_job_again(tmp_path: Path) -> None:
    queue = tmp_path / "scontrol"
    queue.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    queue.chmod(0o755)
    env = {"SLURM_JOB_ID": "17", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "mpitrain", "elastic", "--requeue", "--pause", "30", "--run", str(tmp_path / "run")]
    result = run(
        [*words, "--", sys.executable, "-c", "raise SystemExit(3)"],
        env=env, when="relaunch 2 of at most 10 in 30 s", send=signal.SIGUSR1, timeout_s=30,
    )  # fmt: skip
    assert result.returncode == 128 + signal.SIGUSR1, str(result)
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert "scontrol requeue 17: the job waits in the queue" in result.stderr.splitlines()[-1], str(result)


@pytest.mark.parametrize(
    ("state", "send", "is_queued"),
    [
        ("RUNNING", 0, True),  # the ranks alone got the SIGTERM of a GraceTime
        ("RUNNING", signal.SIGTERM, True),
        ("RUNNING", signal.SIGINT, False),
        ("COMPLETING", 0, False),  # scancel
        ("", 0, False),
    ],
)
def test_a_job_that_saves_at_the_begin_of_a_preemption_is_queued_again(
    tmp_path: Path, state: str, send: int, is_queued: bool
) -> None:
    for name, line in (("scontrol", f'echo "$@" > {tmp_path}/asked'), ("squeue", f"echo {state}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = "print('starts', flush=True)\n" + PROGRAM
    script += f"while {bool(send)} and not stop_asked(): time.sleep(0.02)\nrun.done('stopped', 7)"
    env = {"SLURM_JOB_ID": "17", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "mpitrain", "elastic", "--requeue", "--run", str(tmp_path / "run"), "--"]
    signals = {"when": "starts", "send": send} if send else {}
    result = run([*words, sys.executable, "-c", script, "--run", str(tmp_path / "run")], env=env, **signals)  # type: ignore[arg-type]
    assert result.returncode == 0, str(result)
    assert (tmp_path / "asked").exists() == is_queued, str(result)
    assert ("Slurm does not tell the state of this job" in result.stderr) == (not state), str(result)
    if is_queued:
        record = json.loads((tmp_path / "run/.requeue").read_text())
        assert record == {"job": "17", "fruitless": int(send != 0), "step": 7, "saved": 0}, (
            "a stop before the first step may do one"
        )


def test_a_request_to_stop_from_before_the_first_launch_starts_nothing(tmp_path: Path) -> None:
    """mpirun/elastic tells of a signal that came earlier; another one comes while the supervisor asks mpirun for its version."""
    for name, line in (("scontrol", f'echo "$@" >> {tmp_path}/asked'), ("mpirun", "kill -s USR1 $PPID")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_ID": "17", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "mpitrain", "elastic", "--requeue", "--run", str(tmp_path / "run"), "--"]
    for launcher, earlier in (("mpirun", {}), ("true", {"MPITRAIN_STOP_ASKED": "1"})):
        result = run([*words, launcher, "python"], env=env | earlier)
        assert result.returncode == 128 + signal.SIGUSR1, str(result)
        assert "launch 1" not in result.stderr and "scontrol requeue 17" in result.stderr, str(result)
    assert (tmp_path / "asked").read_text() == "requeue 17\n" * 2


def test_the_proxies_of_mpich_are_told_the_variables_of_the_supervisor(tmp_path: Path) -> None:
    """-genvnone keeps all others from ranks on other hosts."""
    launcher, folder = tmp_path / "mpirun", tmp_path / "run"
    launcher.write_text('#!/bin/sh\n[ "$1" = --version ] && echo HYDRA || printf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    words = [sys.executable, "-m", "mpitrain", "elastic", "--max-relaunches", "0", "--run", str(folder), "--"]
    result = run([*words, launcher, "-genvnone", "-np", "1", "python"], env={"PYTHONPATH": str(ROOT)})
    said = result.stdout.splitlines()
    assert said[18:] == ["-genvnone", "-np", "1", "python"] and said[:18:3] == ["-genv"] * 6, str(result)
    told = dict(zip(said[1:18:3], said[2:18:3], strict=True))
    assert set(told) == set(VARIABLES) and told[marks.FOLDER_VARIABLE] == str(folder), str(result)


def test_steps_before_a_relaunch_that_slurm_stops_early_count(tmp_path: Path) -> None:
    queue, folder = tmp_path / "scontrol", tmp_path / "run"
    queue.write_text("#!/bin/sh\n")
    queue.chmod(0o755)
    folder.mkdir()
    (folder / ".requeue").write_text(json.dumps({"job": "17", "fruitless": 1, "step": 100}))
    script = PROGRAM + (
        "if launch_number() == 1: run.alive('training', 100); run.alive('training', 1100); time.sleep(0.5); sys.exit(3)\n"
        "while not stop_asked(): time.sleep(0.02)\n"
        "run.done('stopped', 1101)"
    )
    words = [sys.executable, "-m", "mpitrain", "elastic", "--requeue", "--run", str(folder), "--", sys.executable, "-c"]
    env = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = run([*words, script, "--run", str(folder)], env=env | {"PYTHONPATH": str(ROOT)}, when="launch 2")
    assert result.returncode == 0, str(result)
    assert json.loads((folder / ".requeue").read_text()) == {"job": "17", "fruitless": 0, "step": 1101, "saved": 0}, (
        str(result)
    )


def test_a_job_that_slurm_stops_before_its_first_step_is_not_queued_for_ever(tmp_path: Path) -> None:
    """A run does the step in progress, so each job would come one step further."""
    queue, folder = tmp_path / "scontrol", tmp_path / "run"
    queue.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    queue.chmod(0o755)
    script = PROGRAM + "while not stop_asked(): time.sleep(0.02)\nrun.done('stopped', 100 + launch_number())"
    words = [sys.executable, "-m", "mpitrain", "elastic", "--requeue", "--run", str(folder), "--", sys.executable, "-c"]
    for restarts in ("0", "1"):
        env = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": restarts, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        result = run(
            [*words, script, "--run", str(folder)],
            env=env | {"PYTHONPATH": str(ROOT)}, when="launch", send=signal.SIGUSR1, timeout_s=30,
        )  # fmt: skip
        assert (result.returncode == 0) == (restarts == "0"), str(result)
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert "not queued again: 2 jobs in a row did no new step" in result.stderr.splitlines()[-1], str(result)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = PROGRAM + "run.alive('training', 1); run.alive('training', 2); time.sleep(60)"

    def interrupt_twice() -> None:
        parents = processes_of(folder)
        (supervisor,) = {parent for parent in parents.values() if parent not in parents}
        os.kill(supervisor, signal.SIGINT)
        time.sleep(0.5)
        os.kill(supervisor, signal.SIGINT)

    once_at_step(folder, 2, interrupt_twice)
    result = elastic(1, ["--run", str(folder)], ["-c", script, "--run", str(folder)], timeout_s=40)
    assert result.returncode == 130, str(result)
    assert processes_of(folder) == {}


def test_refused_settings_are_not_tried_again(tmp_path: Path, corpus: Path) -> None:
    result = elastic(1, [], [*command(tmp_path / "run", corpus), "--train.batch", "0"], timeout_s=60)
    assert result.returncode == 1, str(result)
    assert result.stderr.count("elastic: launch ") == 1, str(result)
    assert "mpitrain: error: train.batch" in result.stdout + result.stderr, str(result)
    assert "these settings are refused" in result.stderr.splitlines()[-1], str(result)


@pytest.mark.rest
def test_a_folder_that_another_job_holds_may_become_free(tmp_path: Path, corpus: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    lock = FolderLock(folder)
    result = elastic(1, ["--max-relaunches", "1"], command(folder, corpus), timeout_s=60)
    lock.release()
    assert result.returncode == 1, str(result)
    assert result.stdout.count("is being trained by") + result.stderr.count("is being trained by") >= 2, str(result)
    assert "giving up after 1 relaunch without a new step" in result.stderr, str(result)
    assert not (folder / marks.DONE).exists(), "a job that does not hold the folder writes no mark of its end"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--", "no-mpirun", "-np", "2", "python"], "no-mpirun is not found: expected a command such as mpirun -np 4"),
        ([], "expected -- and a command"),
        (["--nodes", "3:2", "--", "mpirun", "python"], "--nodes: expected min:max, such as 2:4, got '3:2'"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], text: str) -> None:
    mpirun, settings = job_environment(1)
    words = [mpirun if word == "mpirun" else word for word in words]
    result = run([sys.executable, "-m", "mpitrain", "elastic", *words], cwd=ROOT, env=settings, timeout_s=30)
    assert (result.returncode, result.stdout) == (2, ""), str(result)
    assert len(result.stderr.splitlines()) == 1 and text in result.stderr, str(result)
