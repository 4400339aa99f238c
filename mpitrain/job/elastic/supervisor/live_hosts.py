"""The hosts of a run: those that answer, those of the next launch, and the lost ones that come back."""

import threading
from collections.abc import Mapping

from mpitrain.job.elastic.supervisor.agents import Answer, clean, count, probe, sweep
from mpitrain.job.elastic.supervisor.batch import ending_state
from mpitrain.job.elastic.supervisor.hosts import Host, choose, is_own, num_ranks
from mpitrain.job.elastic.supervisor.mpi_files.sessions import Sessions
from mpitrain.job.elastic.supervisor.plan import SupervisorPlan
from mpitrain.job.elastic.supervisor.texts import say


class LiveHosts:
    """The hosts of a plan. `supervisor`: the id in the environment of all processes of this supervisor's launches.

    `chosen`: the hosts of the next launch; `least`: the number of hosts that it needs; `are_probed`: whether they were asked since the
    last pause.
    """

    def __init__(self, plan: SupervisorPlan, supervisor: str, sessions: Sessions) -> None:
        self._plan, self._supervisor, self._sessions = plan, supervisor, sessions
        self.chosen: list[Host] = []
        self.least = plan.least
        self.are_probed = False
        self._live: list[str] = [host.name for host in plan.hosts]
        self._lost: list[str] = []
        self._back: list[str] = []
        self._indices: dict[str, int] = {}
        for host in plan.hosts:  # a batch system counts the slots
            self._indices[host.name] = sum(other.slots for other in plan.hosts[: len(self._indices)])

    def begin_launch(self) -> None:
        """Forget what a look during an earlier launch has found."""
        self._back = []

    def probe(self) -> None:
        """Find the hosts that answer, and end and remove what earlier launches have left there; choose the hosts of the next launch."""
        names = [host.name for host in self._plan.hosts]
        left = self._sessions.left
        answers = sweep(self._plan.agent, names, self._supervisor, left, self._plan.limits.probe_s, self._indices)
        self.are_probed = True
        if num := sum(answer.ended for answer in answers.values()):
            say(f"ended {num} process{'es' * (num != 1)} that the last launch had left")
        self._settle(answers)
        lost = [name for name in names if name not in answers]
        if lost and lost != self._lost:
            say(f"no answer within {self._plan.limits.probe_s:g} s from {', '.join(lost)}")
        self._lost = lost
        self._live = [name for name in names if name in answers]
        self.chosen = choose(self._plan.hosts, self._live, self._plan.most)

    def clean(self) -> None:
        """Remove the folders of launches that have ended by themselves."""
        if left := self._sessions.left:
            hosts = [name for name in self.reachable() if name in self._sessions.hosts()]
            self._settle(clean(self._plan.agent, hosts, left, self._plan.limits.probe_s, self._indices))

    def reachable(self) -> list[str]:
        """The hosts that are asked at the end of a launch: those that answered last, but this one alone while Slurm ends the job. Then
        steps on others may not start any more, and would take of the time until SIGKILL."""
        is_ending = not all(map(is_own, self._live)) and ending_state()
        return list(filter(is_own, self._live)) if is_ending else self._live

    def _settle(self, answers: Mapping[str, Answer]) -> None:
        for line in self._sessions.settle({host: answer.folders for host, answer in answers.items()}):
            say(line)

    def count(self, script: str) -> dict[str, int]:
        """The numbers that a shell script counts in $num on the hosts that are reachable, and on this one."""
        return count(self._plan.agent, self.reachable(), script, self._plan.limits.probe_s, self._indices)

    def are_enough(self) -> bool:
        """Whether a launch has the hosts that it needs."""
        return not self._plan.hosts or len(self.chosen) >= self.least

    def are_fewer(self) -> bool:
        """Whether fewer hosts are chosen than may take part."""
        return len(self.chosen) < min(len(self._plan.hosts), self._plan.most or len(self._plan.hosts))

    def too_few(self) -> str:
        """Words for a lack of hosts."""
        num, least = len(self.chosen), self.least
        return f"expected at least {least} host{'s' * (least > 1)}, and {num or 'none'} answer{'s' * (num < 2)}"

    def missing(self) -> list[str]:
        """The hosts that could take part, and do not, if a job with them would have more ranks."""
        plan = self._plan
        if not plan.rejoin or not self.are_fewer():
            return []
        all_hosts = choose(plan.hosts, [host.name for host in plan.hosts], plan.most)
        now, then = (num_ranks(plan.command.ranks, plan.hosts, hosts) for hosts in (self.chosen, all_hosts))
        if then is not None and now is not None and then <= now:
            return []
        chosen = {host.name for host in self.chosen}
        return [host.name for host in self._plan.hosts if host.name not in chosen]

    def are_back(self) -> bool:
        """Whether the last look at the missing hosts found any; starts the next look, in the background."""
        names = self.missing()
        back, self._back = self._back, []
        if any(name in names for name in back):  # an answer may be from a time when another host was missing
            return True

        def look() -> None:
            self._back = probe(self._plan.agent, names, self._plan.limits.probe_s, self._indices)

        threading.Thread(target=look, name="mpitrain-rejoin", daemon=True).start()
        return False
