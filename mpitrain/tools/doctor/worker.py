"""Carries out the checks, as a rank of MPI or alone: `python -m mpitrain.tools.doctor.worker FD WORK`, started by doctor_command.py.

It writes a line of JSON to the file descriptor FD at the beginning and the end of each check, so that doctor_command.py knows of it
even if MPI or a library ends this process. WORK is JSON: the options, the names of the checks, and whether to use MPI.
"""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import collectives
from collectives.diagnosis.hangs import deadline
from collectives.processes import end_with_parent
from mpitrain.tools.doctor.checks import CHECKS, Check, CheckJob, DoctorOptions
from mpitrain.tools.doctor.findings import Finding, Level

START, END = "start of MPI", "end of MPI"
_MEETING_LIMIT_S = 60.0
_START_LIMIT_S, _END_LIMIT_S, _SLACK_S = 90.0, 30.0, 5.0
_NAP_S = 2e-3


class Failed(NamedTuple):
    """A check that did not end in time, or raised an exception, on one rank."""

    text: str


def bounded(measure: Callable[[], Any], limit_s: float) -> Any:
    """The result of `measure`, or Failed if it raises or takes longer than `limit_s`. A thread that hangs is left behind."""
    answers: list[Any] = []

    def call() -> None:
        try:
            answers.append(measure())
        except Exception as error:
            answers.append(Failed(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else Failed(f"no end within {limit_s:g} s")


def failure(check: Check, place: str, failed: Failed) -> Finding:
    """The finding about a check that itself has failed."""
    return Finding(
        Level.ERROR, check.name, failed.text, f"the check ends within {check.limit_s:g} s", check.remedy, place
    )


def judged(check: Check, facts: dict[str, Any]) -> list[Finding]:
    """What a check says about the facts of all places."""
    failures = [failure(check, place, its) for place, its in facts.items() if isinstance(its, Failed)]
    good = {place: its for place, its in facts.items() if not isinstance(its, Failed)}
    try:
        findings = check.judge(good) if good else []
    except Exception as error:  # a fact that nobody has thought of
        findings = [failure(check, "", Failed(f"cannot be judged: {type(error).__name__}: {error}"))]
    return [replace(finding, group=check.group) for finding in failures + findings]


def main(fd: int, work: dict[str, Any]) -> None:
    end_with_parent()
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, too, and ends this process

    def tell(**message: Any) -> None:
        os.write(fd, json.dumps(message, default=str).encode() + b"\n")

    options, comm = DoctorOptions(*work["options"]), None
    if work["mpi"]:
        tell(begin=START, limit_s=_START_LIMIT_S)
        try:
            comm = _world()
        except Exception as error:
            tell(no_mpi=str(error))
            return
    job = _job(options, comm)
    if comm is not None and collectives.launched_rank() >= 0:
        tell(job=(comm.size, comm.num_nodes))
    for check in CHECKS:
        if check.name not in work["checks"] or (check.on == "job" and comm is None):
            continue
        limit_s = min(check.limit_s, options.limit_s)
        tell(begin=check.name, limit_s=limit_s + min(limit_s, _SLACK_S))
        facts = _measure(check, job, limit_s, tell)
        if job.rank == 0:
            shown = {place: its._asdict() if hasattr(its, "_asdict") else its for place, its in facts.items()}
            tell(check=check.name, findings=[each.to_dict() for each in judged(check, facts)], facts=shown)
    tell(begin=END, limit_s=_END_LIMIT_S)
    if comm is not None:
        comm.barrier()
    tell(over=True)


def _world() -> collectives.Communicator:
    """The world, whose wait for ranks of other versions ends before the limit of this phase."""
    said = os.environ.get("MPITRAIN_DEADLINE_S")
    seconds = deadline.from_environment()
    os.environ["MPITRAIN_DEADLINE_S"] = f"{min(seconds or math.inf, _MEETING_LIMIT_S):g}"
    comm = collectives.world()
    collectives.set_deadline(seconds)
    os.environ.pop("MPITRAIN_DEADLINE_S") if said is None else os.environ.update(MPITRAIN_DEADLINE_S=said)
    return comm


def _job(options: DoctorOptions, comm: collectives.Communicator | None) -> CheckJob:
    """The names of all ranks. Hosts of one name get the number of their first rank."""
    name = os.uname().nodename
    if comm is None:
        return CheckJob(options, None, (f"rank 0 on {name}",), (0,))
    names = comm.all_gather_object(name)
    leader_of = {rank: ranks[0] for ranks in comm.nodes for rank in ranks}
    leaders = tuple(sorted(set(leader_of.values())))
    hosts = [names[leader] for leader in leaders]
    unique = [
        host if hosts.count(host) == 1 else f"{host} (rank {leader})"
        for leader, host in zip(leaders, hosts, strict=True)
    ]
    places = tuple(f"rank {rank} on {unique[leaders.index(leader_of[rank])]}" for rank in range(comm.size))
    return CheckJob(options, comm, places, leaders)


def _meet(comm: collectives.Communicator) -> None:
    """A barrier that leaves the cores to the ranks that still measure: a wait in MPI would keep them busy."""
    request = comm.mpi.Ibarrier()
    while not request.Test():
        time.sleep(_NAP_S)


def _measure(check: Check, job: CheckJob, limit_s: float, tell: Callable[..., None]) -> dict[str, Any]:
    """The facts of all places, by name."""
    facts = None
    if check.on == "job":
        facts = check.measure(job)
    elif check.on == "rank" or job.rank in job.leaders:
        facts = bounded(lambda: check.measure(job), limit_s)
    tell(waits=check.name)
    if job.comm is not None and check.on != "job":
        _meet(job.comm)
    gathered = [facts] if job.comm is None else job.comm.all_gather_object(facts)
    places = [place.rpartition(" on ")[2] for place in job.places] if check.on == "host" else job.places
    found = {place: its for place, its in zip(places, gathered, strict=True) if its is not None}
    if check.name in ("clocks", "same folder"):
        found = {place.rpartition(" on ")[2]: its for place, its in found.items()}
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
