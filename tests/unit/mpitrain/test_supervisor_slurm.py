"""The supervisor in a job of Slurm: the words of srun, the end of the job by Slurm, and the return to the queue."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mpitrain.job.elastic.supervisor import batch, decisions, elastic_command, supervisor
from mpitrain.job.elastic.supervisor.agents import parse_agent
from mpitrain.job.elastic.supervisor.decisions import LaunchOutcome, LaunchProgress, Policy
from mpitrain.job.elastic.supervisor.folder import RunFolder
from mpitrain.job.elastic.supervisor.hosts import Host
from mpitrain.job.elastic.supervisor.requests import SignalRequests
from mpitrain.job.elastic.supervisor.srun import in_job, parse_srun
from mpitrain.job.elastic.supervisor.words import Command
from mpitrain.job.record.files.marks import Done

TRAIN = ("python", "-m", "mpitrain", "--run", "a/b", "-n", "7")
ALL = (Host("n1", 4), Host("n2", 4), Host("n3", 2))


def expand(text: str) -> list[str]:
    return {"n[1-2]": ["n1", "n2"], "n[2-3]": ["n2", "n3"]}.get(text, text.split(","))


@pytest.mark.parametrize(
    ("options", "hosts", "ranks", "most", "kept"),
    [
        ("", "n1:4 n2:4 n3:2", None, None, ""),
        ("--mpi=pmix -n 8", "n1:4 n2:4 n3:2", 8, None, "--mpi=pmix"),
        ("--mpi pmix -n8 -N2", "n1:4 n2:4 n3:2", 8, 2, "--mpi pmix"),
        ("--nodes 1-2 --ntasks=4 --cpu-bind cores", "n1:4 n2:4 n3:2", 4, 2, "--cpu-bind cores"),
        ("-w n[2-3] --ntasks-per-node 1 -l", "n2:1 n3:1", None, None, "-l"),
        ("--nodelist=n2,n1 -ul -n4", "n1:4 n2:4", 4, None, "-ul"),
        ("-uln 4 -c 2", "n1:4 n2:4 n3:2", 4, None, "-ul -c 2"),
        ("--exclude n[1-2] -K1 -J name", "n3:2", None, None, "-K1 -J name"),
        ("-x n1 -r 1 --kill-on-bad-exit -t 5", "n2:4 n3:2", None, None, "--kill-on-bad-exit -t 5"),
        ("-Jn4 -o out -k --overlap --", "n1:4 n2:4 n3:2", None, None, "-Jn4 -o out -k --overlap --"),
        ("--whole -n 8 --test-only --x11", "n1:4 n2:4 n3:2", 8, None, "--whole --test-only --x11"),
        ("--nodel n2 --tasks-p 2 -n 8 --overc", "n2:2", 8, None, "--overc"),  # srun takes the begin of a name
        ("--image=a --no-mount -n 8", "n1:4 n2:4 n3:2", 8, None, "--image=a --no-mount"),  # of a plugin
        ("-n 8 --no-mount --", "n1:4 n2:4 n3:2", 8, None, "--no-mount --"),
    ],
)
def test_a_command_of_srun(options: str, hosts: str, ranks: int | None, most: int | None, kept: str) -> None:
    given = ["srun", *options.split(), *TRAIN]
    command = parse_srun(given, ALL, expand)
    assert command.words() == given and command.program == TRAIN
    assert " ".join(f"{host.name}:{host.slots}" for host in command.hosts) == hosts
    assert (command.ranks, command.most, " ".join(command.options)) == (ranks, most, kept)


def test_a_command_of_srun_on_other_hosts() -> None:
    command = parse_srun(["srun", "-N2", "--mpi=pmix", "-n", "8", *TRAIN], ALL[:2], expand)
    words = command.on([Host("n2", 4)], 4).words()
    assert words == ["srun", "--nodes=1", "--nodelist=n2", "--ntasks=4", "--ntasks-per-node=4", "--mpi=pmix", *TRAIN]
    assert command.on(ALL[1:], None).words()[1:4] == ["--nodes=2", "--nodelist=n2,n3", "--ntasks=6"]
    assert "--ntasks-per-node=3" not in command.on(ALL[1:], None).words()
    assert in_job(command).words()[1:3] == ["--export=ALL", "--overlap"]
    asked = parse_srun(["srun", "--export", "ALL,A=1", "--exact", *TRAIN], ALL, expand)
    assert in_job(asked).words() == asked.words()


@pytest.mark.parametrize("form", ["--export={}", "--export {}", "--expor={}"])
@pytest.mark.parametrize(
    ("value", "kept"), [("NONE", ""), ("nil", ""), ("A=1", ",A=1"), ("A=1,PATH", ",A=1,PATH"), ("ALLOW=1", ",ALLOW=1")]
)
def test_ranks_have_the_variables_of_the_supervisor_whatever_the_user_exports(
    tmp_path: Path, form: str, value: str, kept: str
) -> None:
    variables = RunFolder(tmp_path).prepare("me")
    asked = parse_srun(["srun", "--comment", "export", *form.format(value).split(), "-n2", *TRAIN], ALL, expand)
    command = in_job(asked)
    export = f"--export={','.join(variables)}{kept}"
    assert sorted(variables) == sorted(export.removesuffix(kept).partition("=")[2].split(","))
    assert command.words() == ["srun", "--overlap", "--comment", "export", export, "-n2", *TRAIN]
    assert command.on(ALL[:1], 2).words()[4:] == ["--overlap", "--comment", "export", export, *TRAIN]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n none", "--ntasks: expected a whole number from 1, got 'none'"),
        ("-N 0", "--nodes: expected a number of nodes"),
        ("-w n9", "--nodelist: n9 is not among the hosts"),
        ("-x n1,n2,n3", "expected at least one host"),
        ("--mpi=pmix python : srun", "several parts"),
        ("--ntask 8", "srun --ntask: expected the whole name of an option, got the begin of ntasks, ntasks-per-board"),
        ("--frobnicate", "srun --frobnicate: it is not known whether python is its value; expected --option=value"),
        ("-n2 -y", "srun -y: it is not known whether python is its value"),
        ("--node 2", "srun --node: expected the whole name of an option, got the begin of nodelist, nodes"),
    ],
)
def test_wrong_words_of_srun(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_srun(["srun", *options.split(), *TRAIN], ALL, expand)
    with pytest.raises(ValueError, match="expected a program"):
        parse_srun(["srun", "-n", "4"], ALL, expand)


def test_the_end_of_a_job_by_slurm_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("SQUEUE_PARTITION", "SQUEUE_USERS", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "other")  # they would hide the job
    for said, state in (("RUNNING", ""), ("COMPLETING", "COMPLETING"), ("PREEMPTED", "PREEMPTED"), ("", "")):
        squeue.write_text(f"#!/bin/sh\n! env | grep -q =other && [ $3 = 7 ] && echo {said}\n")
        squeue.chmod(0o755)
        assert batch.ending_state({"SLURM_JOB_ID": "7"}) == state
        assert batch.job_state({"SLURM_JOB_ID": "7"}) == said
    # The last task of an array has the array's own number, of which squeue lists all tasks.
    squeue.write_text("#!/bin/sh\n[ $3 = 5_3 ] && echo RUNNING || echo COMPLETED RUNNING\n")
    task = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    assert batch.job_state(task) == "RUNNING" and not batch.ending_state(task)
    assert batch.job_name(task | {"SLURM_JOB_ID": "9"}) == "9", (
        "another task, or a job that a task has submitted: they have own numbers"
    )
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert batch.ending_state({"SLURM_JOB_ID": "7"}) == batch.ending_state({}) == ""
    outcome = LaunchOutcome(None, 12, "batch", "Slurm ends this job (COMPLETING)")
    following = decisions.decide(Policy(), LaunchProgress(), outcome)
    assert (following.action, following.code, following.progress.failures) == ("end", 1, 0)
    assert following.text.startswith("Slurm ends this job (COMPLETING); the next job goes on")
    saved = decisions.decide(Policy(), LaunchProgress(), LaunchOutcome(Done(1, "stopped", 12), 12))
    assert (saved.action, saved.code) == ("end", 0), "the ranks got Slurm's SIGTERM, and saved"


def test_a_run_without_new_steps_is_not_queued_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol, asked = tmp_path / "scontrol", tmp_path / "asked"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nkill -s TERM $$\n')  # Slurm sends it as soon as it obeys
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said: list[str] = []

    def job(restarts: int, *, has_new_step: bool, number: str = "7", saved: int = 0, step: int = 0) -> bool:
        environ = {"SLURM_JOB_ID": number} | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})
        queue = batch.Queue(tmp_path, said.append, environ, saved=saved)
        return queue.enter(has_new_step=has_new_step or step > queue.best_step, step=step, hint="Why?")

    for restarts, has_new_step, is_queued in (
        *((0, False, True), (1, True, True), (2, False, True), (3, False, False)),
        *((0, False, True), (1, False, False)),  # submitted anew
    ):
        assert job(restarts, has_new_step=has_new_step) == is_queued, (restarts, said)
    assert asked.read_text().split("\n")[:-1] == ["requeue 7"] * 4
    none = "not queued again: 2 jobs in a row did no new step (the greatest was 0, the greatest in a checkpoint none). Why?"
    assert said[-1] == none
    assert job(1, has_new_step=False, number="8"), "the count of job 7 is not job 8's"
    assert not job(2, has_new_step=False, number="8")
    # Between the two returns Slurm itself queued the job again, after new steps.
    assert job(0, has_new_step=False) and job(2, has_new_step=False, saved=1000)
    assert not job(3, has_new_step=False, saved=1000)
    # Each job comes to the same step, and ends before its first checkpoint.
    assert job(0, has_new_step=False, step=50) and job(1, has_new_step=False, step=50)
    assert not job(2, has_new_step=False, step=50)
    (tmp_path / batch.QUEUE).write_text(json.dumps({"fruitless": "many"}))  # damaged
    assert job(1, has_new_step=False)
    asked.unlink()
    environ = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    assert batch.Queue(tmp_path, said.append, environ).enter(has_new_step=True)
    assert asked.read_text() == "requeue 5_3\n", "not the other tasks of the array"
    scontrol.write_text("#!/bin/sh\nexit 3\n")
    assert not job(1, has_new_step=True) and said[-1] == "the job is not in the queue again: exit code 3 of scontrol"


@pytest.mark.parametrize(
    ("jobs", "is_queued"),
    [
        # before the job, the greatest step of it, after it
        ([(0, 1000, 0), (0, 400, 100), (100, 700, 400), (400, 990, 700)], [True] * 4),
        ([(0, 1000, 0), (0, 400, 0), (0, 1000, 0)], [True, True, False]),
        ([(0, 1000, 100), (100, 400, 100), (100, 700, 100)], [True, True, False]),
        (
            [(0, 10, 10), (10, 10, 10), (50, 50, 50), (50, 50, 50)],
            [True, True, True, False],
        ),  # Slurm queued it again itself
        ([(0, 1000, 100), (100, 900, 100), (500, 900, 500), (500, 800, 500)], [True, True, True, False]),
    ],
)
def test_jobs_that_save_steps_get_on_also_if_an_earlier_one_has_lost_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[tuple[int, int, int]], is_queued: list[bool]
) -> None:
    (scontrol := tmp_path / "scontrol").write_text("#!/bin/sh\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = tmp_path / "run"
    said: list[str] = []
    monkeypatch.setattr(supervisor, "say", said.append)

    def save(step: int) -> None:
        (run / f"checkpoints/step-{step:08}").mkdir(parents=True, exist_ok=True)

    for number, ((before, reached, after), queued) in enumerate(zip(jobs, is_queued, strict=True)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        if before:
            save(before)
        words = Command("true", "other", (), ("python",))
        plan = supervisor.SupervisorPlan(words, (), parse_agent("false"), requeue=True)
        job = supervisor.Supervisor(
            plan, RunFolder(run), cast(SignalRequests, SimpleNamespace(stop=signal.SIGUSR1, end=0))
        )

        def launch(job: supervisor.Supervisor = job, step: int = reached, saved: int = after) -> LaunchOutcome:
            if saved:
                save(saved)
            job._requests.stop = signal.SIGUSR1
            return LaunchOutcome(Done(1, "stopped", step), step, "user")

        monkeypatch.setattr(job, "_launch", launch)
        job._requests.stop = 0
        assert (job.run() == 0) == queued, (number, said)
        assert any("not queued again" in line for line in said) != queued


@pytest.mark.parametrize(("in_batch_job", "again", "ends"), [(True, 15, 0), (True, 2, 2), (False, 15, 15)])
def test_a_batch_system_may_repeat_its_signal(in_batch_job: bool, again: int, ends: int) -> None:
    signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        requests = SignalRequests(in_batch_job=in_batch_job, environ={})
        for signum in (signal.SIGTERM, again):
            os.kill(os.getpid(), signum)
        assert (requests.stop, requests.end) == (signal.SIGTERM, ends)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("environ", "is_batch"),
    [
        ("SLURM_JOB_ID=7 SLURMD_NODENAME=n1", True),
        (
            "SLURM_JOB_ID=7 SLURMD_NODENAME=n1 SLURM_PTY_PORT=3 ENVIRONMENT=BATCH",
            True,
        ),  # submitted in an interactive one
        ("SLURM_JOB_ID=7 SLURMD_NODENAME=n1 SLURM_PTY_PORT=3", False),
        ("SLURM_JOB_ID=7", False),  # a shell of salloc on a login node
        ("PBS_JOBID=7 PBS_ENVIRONMENT=PBS_BATCH", True),
        ("PBS_JOBID=7 PBS_ENVIRONMENT=PBS_INTERACTIVE", False),
        ("", False),
    ],
)
def test_batch_jobs_are_those_without_a_user(environ: str, is_batch: bool) -> None:
    job = dict(word.split("=") for word in environ.split())
    assert batch.is_unattended(job) == is_batch
    assert batch.is_batch_job(job) == bool(job)


def test_the_smaller_of_both_numbers_of_nodes_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, line in (("scontrol", "echo n1 n2 n3 n4"), ("srun", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    program = ("python", "-m", "mpitrain", "--run", str(tmp_path / "run"))
    for nodes, given, most in (("2:4", ["-N2"], 2), ("1:2", ["--nodes=3"], 2), ("2:4", [], 4), ("", ["-N", "1-3"], 3)):
        words = [f"--nodes={nodes}", "--", "srun", *given, "-n8", *program]
        assert elastic_command._plan(words)[0].most == most, words
    assert elastic_command.main(["--nodes=2:4", "--", "srun", "-N1", *program]) == 2
    assert "--nodes 2:4: expected at most 1, the number of srun's own --nodes, got 2" in capsys.readouterr().err
    assert elastic_command.main(["--requeue", "--", "srun", *program, "--resume", "never"]) == 2
    assert "--requeue: expected resume = auto or a checkpoint, got never, by which each job" in capsys.readouterr().err


@pytest.mark.parametrize("earlier", [None, 5, 500])
def test_jobs_of_the_queue_go_on_with_the_own_checkpoints_of_a_run_that_began_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int | None
) -> None:
    """Also where Slurm has queued the job again itself, and an earlier run in the folder came further."""
    place, given = tmp_path / "run/checkpoints", "other/step-00000010"
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def start(restarts: int, resume: str = given) -> str | None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        words = Command("true", "other", (), ("python", "--resume", resume))
        plan = supervisor.SupervisorPlan(words, (), parse_agent("false"), requeue=True)
        return supervisor.Supervisor(plan, RunFolder(tmp_path / "run"), cast(SignalRequests, None))._start()

    if earlier is not None:
        (place / f"step-{earlier:08}").mkdir(parents=True)
    assert start(0) is None, "the checkpoint that the user has named"
    assert start(1) is None, "the first job has saved nothing"
    (place / "step-00000020").mkdir(parents=True)
    own = "auto" if earlier != 500 else str(place / "step-00000020")
    assert start(2) == start(3) == own
    assert json.loads((tmp_path / "run" / batch.QUEUE).read_text())["saved"] == 0, (
        "the steps of the earlier run count for none"
    )
    assert start(4, "auto") is None
    assert start(0) is None, "submitted anew"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert start(1) is None, "the first job that has come so far"
    many = {"step-00000020": 2**63}  # such as Lustre's inodes
    batch.Queue(tmp_path, print, {"SLURM_JOB_ID": "9"}).earlier(many)
    assert batch.Queue(tmp_path, print, {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}).earlier({}) == many
    monkeypatch.delenv("SLURM_JOB_ID")
    (tmp_path / "run" / batch.QUEUE).unlink()
    assert start(0) is None and not (tmp_path / "run" / batch.QUEUE).exists()
