"""The supervisor in a job of Slurm: the words of srun, the end of the job by Slurm, and the return to the queue."""

import json
import os
import signal
from pathlib import Path

import pytest

from mpitrain.elastic.marks import Done
from mpitrain.elastic.supervisor import batch, decisions
from mpitrain.elastic.supervisor.decisions import Outcome, Policy, Progress
from mpitrain.elastic.supervisor.hosts import Host
from mpitrain.elastic.supervisor.requests import Requests
from mpitrain.elastic.supervisor.srun import in_job, parse_srun

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n none", "--ntasks: expected a whole number from 1, got 'none'"),
        ("-N 0", "--nodes: expected a number of nodes"),
        ("-w n9", "--nodelist: n9 is not among the hosts"),
        ("-x n1,n2,n3", "expected at least one host"),
        ("--mpi=pmix python : srun", "several parts"),
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
    for said, state in (("RUNNING", ""), ("COMPLETING", "COMPLETING"), ("PREEMPTED", "PREEMPTED"), ("", "")):
        squeue.write_text(f"#!/bin/sh\n[ $3 = 7 ] && echo {said}\n")
        squeue.chmod(0o755)
        assert batch.ending_state({"SLURM_JOB_ID": "7"}) == state
    squeue.write_text("#!/bin/sh\nexit 1\n")
    assert batch.ending_state({"SLURM_JOB_ID": "7"}) == batch.ending_state({}) == ""
    outcome = Outcome(None, 12, "batch", "Slurm ends this job (COMPLETING)")
    following = decisions.decide(Policy(), Progress(), outcome)
    assert (following.action, following.code, following.progress.failures) == ("end", 1, 0)
    assert following.text.startswith("Slurm ends this job (COMPLETING); the next job goes on")
    saved = decisions.decide(Policy(), Progress(), Outcome(Done(1, "stopped", 12), 12))
    assert (saved.action, saved.code) == ("end", 0), "the ranks got Slurm's SIGTERM, and saved"


def test_a_run_without_new_steps_is_not_queued_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol, asked = tmp_path / "scontrol", tmp_path / "asked"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said: list[str] = []

    def job(restarts: int, *, has_new_step: bool) -> bool:
        environ = {"SLURM_JOB_ID": "7"} | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})
        return batch.Queue(tmp_path, said.append, environ).enter(has_new_step=has_new_step)

    for restarts, has_new_step, is_queued in (
        *((0, False, True), (1, True, True), (2, False, True), (3, False, False)),
        *((0, False, True), (1, False, False)),  # submitted anew
    ):
        assert job(restarts, has_new_step=has_new_step) == is_queued, (restarts, said)
    assert asked.read_text().split("\n")[:-1] == ["requeue 7"] * 4
    assert said[-1].startswith("not queued again: 2 jobs in a row did no new step")
    (tmp_path / batch.QUEUE).write_text(json.dumps({"fruitless": "many"}))  # damaged
    assert job(1, has_new_step=False)


@pytest.mark.parametrize(("in_batch_job", "again", "ends"), [(True, 15, 0), (True, 2, 2), (False, 15, 15)])
def test_a_batch_system_may_repeat_its_signal(in_batch_job: bool, again: int, ends: int) -> None:
    signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        requests = Requests(in_batch_job=in_batch_job)
        for signum in (signal.SIGTERM, again):
            os.kill(os.getpid(), signum)
        assert (requests.stop, requests.end) == (signal.SIGTERM, ends)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
