"""The ways to harm a job from outside, between the beginning of its first step and the end of its last one."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from mpitrain.tools.bench.jobs.job import BenchJob

_WAIT_S = 120.0


class Harm(NamedTuple):
    """What was done to a job: the time of the last blow, the number of steps done before, and the rank."""

    at: float
    step: int
    rank: int = -1


Harmer = Callable[[BenchJob, random.Random], Harm | None]
"""Harms a job whose first step begins. None: the job ended too early."""


def kill(job: BenchJob, pick: Sequence[int], how: int = signal.SIGKILL) -> Harm:
    """Send a signal to ranks of MPI_COMM_WORLD."""
    there = job.ranks()
    step, now = max(job.steps(), default=0), time.time()
    for rank in pick:
        with suppress(ProcessLookupError, KeyError):
            os.kill(there[rank], how)
    return Harm(now, step, pick[0])


def at_random(
    num_ranks: int,
    seconds: float,
    *,
    victim: int | None = None,
    pause_s: float | None = None,
    during: Callable[[BenchJob], bool] = lambda job: True,
) -> Harmer:
    """Kills a rank at a random moment of the first `seconds` from the first step on. `victim`: this one.

    `pause_s`: kills another rank after a random pause of at most so many seconds. `during`: what must hold at that time.
    """

    def harm(job: BenchJob, rng: random.Random) -> Harm | None:
        time.sleep(rng.uniform(0.0, seconds))
        first = rng.randrange(num_ranks) if victim is None else victim
        if job.process.poll() is not None or len(job.ranks()) < num_ranks:
            return None
        harmed = kill(job, [first])
        if pause_s is not None:
            time.sleep(rng.uniform(0.0, pause_s))
            if not during(job):
                return None
            other = rng.choice([rank for rank in range(num_ranks) if rank != first])
            harmed = Harm(kill(job, [other]).at, harmed.step, first)
        return harmed

    return harm


def when(condition: Callable[[BenchJob], bool], num_ranks: int, within_s: float) -> Harmer:
    """Kills a random rank while a condition is true, at most `within_s` after it has become true for the first time."""

    def harm(job: BenchJob, rng: random.Random) -> Harm | None:
        if not job.wait_until(lambda: condition(job), _WAIT_S, every_s=0.001):
            return None
        time.sleep(rng.uniform(0.0, within_s))
        return kill(job, [rng.randrange(num_ranks)]) if condition(job) else None

    return harm


def is_recovering(job: BenchJob) -> bool:
    """Whether a job of which a rank was killed has not yet done a step after it."""
    return not job.events("restore")


def is_saving(job: BenchJob) -> bool:
    """Whether a save is under way."""
    return any(job.run.glob("checkpoints/.step-*.staging"))


def is_evaluating(job: BenchJob) -> bool:
    """Whether the step before an evaluation is done, and the evaluation is not."""
    data = (job.run / "metrics.jsonl").read_bytes() if (job.run / "metrics.jsonl").exists() else b""
    return max(job.steps(), default=0) == 10 and b"heldout_loss" not in data


def by_itself(job: BenchJob, rng: random.Random) -> Harm | None:
    """Waits until a job of mpitrain.tools.bench.jobs.harmed has harmed itself."""
    assert job.harm is not None
    if not job.wait_until(lambda: job.harm_file.exists() and job.harm_file.read_text(), _WAIT_S):
        return None
    return Harm(float(job.harm_file.read_text()), job.harm.step - 1, job.harm.rank)


def launcher(*signals: int, seconds: float, apart_s: float = 0.0) -> Harmer:
    """Sends signals to mpirun at a random moment of the first `seconds` from the first step on."""

    def harm(job: BenchJob, rng: random.Random) -> Harm | None:
        time.sleep(rng.uniform(0.0, seconds))
        if (pid := job.launcher()) is None:
            return None
        harmed = Harm(time.time(), max(job.steps(), default=0))
        for number, each in enumerate(signals):
            time.sleep(apart_s * (number > 0))
            with suppress(ProcessLookupError):
                os.kill(pid, each)
        return harmed

    return harm


def host(seconds: float, *, cut: bool) -> Harmer:
    """Ends a random host at a random moment of the first `seconds` from the first step on. `cut`: cuts its link instead."""

    def harm(job: BenchJob, rng: random.Random) -> Harm | None:
        time.sleep(rng.uniform(0.0, seconds))
        hosts: dict[str, list[int]] = {}
        for rank, pid in sorted(job.ranks().items()):
            hosts.setdefault(_namespace(pid, "pid"), []).append(rank)
        if len(hosts) < 2:
            return None
        name, ranks = sorted(hosts.items())[rng.randrange(len(hosts))]
        pid = job.ranks()[ranks[0]]
        harmed = Harm(time.time(), max(job.steps(), default=0), ranks[0])
        if cut:
            down = ["nsenter", "-t", str(pid), "-U", "-n"] if os.geteuid() else ["nsenter", "-t", str(pid), "-n"]
            subprocess.run([*down, "ip", "link", "set", "eth0", "down"], check=True, timeout=10)
        else:
            for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
                if _namespace(each, "pid") == name:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
        return harmed

    return harm


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def nothing(job: BenchJob, rng: random.Random) -> Harm | None:
    """Only waits for the end."""
    return Harm(time.time(), 0)


def busy_core(job: BenchJob, rng: random.Random) -> Harm | None:
    """Runs another process on one core until the job ends."""
    core = rng.choice(sorted(os.sched_getaffinity(0)))
    words = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() == int(sys.argv[2]): sum(range(10**6))"
    other = subprocess.Popen([sys.executable, "-P", "-c", words, str(core), str(os.getpid())])
    try:
        harmed = Harm(time.time(), 0)
        job.process.wait(3600)
    except subprocess.TimeoutExpired:
        return None
    finally:
        other.kill()
        other.wait()
    return harmed
