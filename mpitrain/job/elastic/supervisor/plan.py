"""What a supervisor is asked to do."""

from dataclasses import dataclass, field

from mpitrain.job.elastic.supervisor.agents import Agent
from mpitrain.job.elastic.supervisor.decisions import Policy
from mpitrain.job.elastic.supervisor.hosts import Host
from mpitrain.job.elastic.supervisor.launch.limits import PhaseLimits
from mpitrain.job.elastic.supervisor.words import Command


@dataclass(frozen=True)
class SupervisorPlan:
    """What a supervisor is asked to do."""

    command: Command
    hosts: tuple[Host, ...]
    """all that may take part, in the order of preference; none if the launcher runs on this host alone, or as it likes"""
    agent: Agent
    least: int = 1
    most: int | None = None
    rejoin: bool = True
    rejoin_s: float = 30.0
    requeue: bool = False
    on_event: str | None = None
    """`log.on_event` of the command"""
    policy: Policy = field(default_factory=Policy)
    limits: PhaseLimits = field(default_factory=PhaseLimits)
