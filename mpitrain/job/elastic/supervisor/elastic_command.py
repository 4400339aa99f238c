"""The command line of `python -m mpitrain elastic`."""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from mpitrain.job.elastic.supervisor.agents import choose_agent, parse_agent
from mpitrain.job.elastic.supervisor.decisions import Policy
from mpitrain.job.elastic.supervisor.folder import RunFolder
from mpitrain.job.elastic.supervisor.hosts import expand_names, of_environment
from mpitrain.job.elastic.supervisor.launch.job import launcher_kind
from mpitrain.job.elastic.supervisor.launch.limits import PhaseLimits
from mpitrain.job.elastic.supervisor.plan import SupervisorPlan
from mpitrain.job.elastic.supervisor.requests import SignalRequests
from mpitrain.job.elastic.supervisor.srun import in_job, parse_srun
from mpitrain.job.elastic.supervisor.supervisor import Supervisor
from mpitrain.job.elastic.supervisor.texts import public, say
from mpitrain.job.elastic.supervisor.words import Command, Kind, agent_of, on_event_of, parse, resume_of, run_folder

_LIMITS = {
    "launch": "from mpirun's start to the start of rank 0; doubled after each launch that took longer",
    "start": "from there to the first step: imports, the model, reading a checkpoint",
    "step": "between two signs of life while the run trains or evaluates",
    "save": "one save",
    "recover": "a recovery in place",
    "report": "from the report of a failure to the end of the job",
    "done": "from the mark of completion to the end of the job",
    "end": "mpirun's end after SIGTERM, before SIGKILL",
    "probe": "the answer of a host",
    "hosts": "the answers of as many hosts as --nodes asks for",
}


def main(argv: Sequence[str], requests: SignalRequests | None = None) -> int:
    """Run the command; returns the exit code. `requests`: of a program that has taken the signals before its imports."""
    try:
        plan, folder = _plan(argv)
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 2
    return Supervisor(plan, folder, requests or SignalRequests()).run()


def _plan(argv: Sequence[str]) -> tuple[SupervisorPlan, RunFolder]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    words = words[at + 1 :]
    if not words:
        raise ValueError(
            "expected -- and a command, such as elastic -- mpirun -np 4 python -m mpitrain, got no command"
        )
    least, most = _nodes(options.nodes)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMIX_", "OMPI_COMM_", "PMI_"))}
    command = _command(words, launcher_kind(words[0], env))
    most = min(filter(None, (command.most, most)), default=None)
    hosts = tuple(command.hosts or (of_environment(os.environ) if command.kind != "other" else ()))
    if hosts and len(hosts) < least:
        raise ValueError(f"--nodes {options.nodes}: expected at least {least} hosts, got {len(hosts)}")
    if most is not None and most < least:
        raise ValueError(
            f"--nodes {options.nodes}: expected at most {most}, the number of srun's own --nodes, got {least}"
        )
    if options.nodes and not hosts:
        raise ValueError(
            "--nodes: no hosts are known; name them by -H of mpirun, or start this in a job of Slurm or PBS"
        )
    if options.requeue and not os.environ.get("SLURM_JOB_ID"):
        raise ValueError("--requeue: expected a job of Slurm, but SLURM_JOB_ID is not set")
    if options.requeue and resume_of(command.program) == "never":
        raise ValueError(
            "--requeue: expected resume = auto or a checkpoint, got never, by which each job of the queue would begin anew; leave "
            "--requeue out of the first job"
        )
    agent = parse_agent(options.agent) if options.agent else choose_agent(agent_of(command, os.environ), os.environ)
    policy = Policy(options.max_relaunches, options.pause, options.max_pause)
    limits = PhaseLimits(**{f"{name}_s": getattr(options, f"{name}_timeout") for name in _LIMITS})
    folder = RunFolder(Path(options.run) if options.run else run_folder(command.program))
    plan = SupervisorPlan(
        command, hosts, agent, least=least, most=most, rejoin=options.rejoin, rejoin_s=options.rejoin_every,
        requeue=options.requeue, on_event=on_event_of(command.program), policy=policy, limits=limits,
    )  # fmt: skip
    return plan, folder


def _command(words: Sequence[str], kind: Kind) -> Command:
    if kind == "srun":
        return in_job(parse_srun(words, of_environment(os.environ), expand_names))
    return parse(words, kind)


def _nodes(text: str) -> tuple[int, int | None]:
    """The smallest and the largest number of hosts of `min:max`; one number is both."""
    if not text:
        return 1, None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"--nodes: expected min:max, such as 2:4, got {text!r}")
    return least, most


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"  # argparse names it in an error


def _whole(text: str) -> int:
    if not text.isdigit():
        raise ValueError
    return int(text)


_whole.__name__ = "whole number"


class _Parser(argparse.ArgumentParser):
    """Its errors quote words."""

    def error(self, message: str) -> NoReturn:
        super().error(public(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mpitrain elastic",
        usage="python -m mpitrain elastic [options] -- mpirun ... python -m mpitrain ...",
        description="Start a job, and start it again on the hosts that answer, until the run has come to its end. The exit code is "
        "0 only if the run has left its mark of completion. SIGUSR1, SIGTERM or Ctrl-C: save and stop; again: end now.",
        allow_abbrev=False,
    )
    policy = Policy()
    add = parser.add_argument
    add("--run", metavar="DIR", help="the run's folder (default: --run or --config of the command, else runs/default)")
    add("--max-relaunches", type=_whole, default=policy.max_relaunches, metavar="N",
        help="relaunches in a row without a new step (default: %(default)s)")  # fmt: skip
    add("--pause", type=_seconds, default=policy.pause_s, metavar="S",
        help="seconds before the second relaunch in a row, doubled before each further one (default: %(default)s)")  # fmt: skip
    add(
        "--max-pause",
        type=_seconds,
        default=policy.max_pause_s,
        metavar="S",
        help="longest pause (default: %(default)s)",
    )
    add("--nodes", default="", metavar="MIN:MAX", help="smallest and largest number of hosts (default: 1 and all)")
    add("--rejoin", action=argparse.BooleanOptionalAction, default=True,
        help="when a lost host answers again: save, stop, and relaunch on more hosts (default: yes)")  # fmt: skip
    add(
        "--rejoin-every",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds between looks at lost hosts (default: %(default)s)",
    )
    add("--agent", metavar="WORDS", help="the command that reaches a host, such as 'ssh -p 2222'; {host} is replaced, or the host "
        "added (default: srun in Slurm, pbsdsh in PBS, else that of mpirun)")  # fmt: skip
    add("--requeue", action="store_true",
        help="in Slurm: queue the job again after a stop by SIGUSR1 or Slurm's SIGTERM, and when too few hosts answer")  # fmt: skip
    defaults = {field.name: getattr(PhaseLimits(), field.name) for field in fields(PhaseLimits)}
    for name, text in _LIMITS.items():
        add(
            f"--{name}-timeout",
            type=_seconds,
            default=defaults[f"{name}_s"],
            metavar="S",
            help=f"{text} (default: %(default)g s)",
        )
    return parser
