"""Watches the process that checks: starts it, hears what it tells, and notices when it hangs or crashes."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from collectives.launcher import ULFM_VARIABLE, environment_of_program, is_on
from collectives.processes import stat_fields
from collectives.programs import python
from mpitrain.tools.doctor.checks import CHECKS, DoctorOptions
from mpitrain.tools.doctor.findings import Finding, Level
from mpitrain.tools.doctor.job import PML
from mpitrain.tools.doctor.worker import END, START

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Rank 0 ends its report before another rank ends, because mpirun then ends all. MPICH's mpirun waits for all ranks.
_GRACE_S, _HYDRA_GRACE_S = 100.0, 20.0
_END_S = 5.0  # for the end of a child whose MPI did not start
_REMEDIES = {
    START: "look for a firewall between the hosts, and name the network that all share (--mca btl_tcp_if_include NAME; MPICH: -iface "
    "NAME); a first try on one host shows whether MPI itself works",
    END: "the results above are complete; see the text that MPI printed, and update the MPI library",
}
_MIXED = (
    "use mpirun and library of one MPI: ./mpirun/train does; else see which mpirun (which mpirun) and which library "
    "(python -m collectives info without mpirun) are used"
)
_STATES = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "D": "waits in the kernel, often for a disk"}


class EndedBySignal(BaseException):
    """The launcher or the user ends this process by a signal."""


def end(number: int, frame: FrameType | None) -> None:
    """Raise EndedBySignal: the handler of SIGNALS."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # the report comes first
    raise EndedBySignal(signal.Signals(number).name)


def _state(pid: int) -> str:
    """The state of a process as /proc has it."""
    return (stat_fields(pid) or [""])[0]


class CheckWatch:
    """The child that checks, and what it has told. `speaks`: this process prints the report."""

    def __init__(self, options: DoctorOptions, names: Sequence[str], *, speaks: bool) -> None:
        self._options, self._left, self._speaks = options, list(names), speaks
        self.findings: list[Finding] = []
        self.facts: dict[str, dict[str, Any]] = {}
        self.phase = "start"
        self.job: tuple[int, int] | None = None
        """The numbers of ranks and hosts of a job under a launcher."""
        self._waits = False  # the child waits for other ranks
        self._children: list[subprocess.Popen[bytes]] = []
        self._own: Finding | None = None  # the hang or crash of this rank's child

    def add(self, finding: Finding) -> None:
        """Add a finding of this process."""
        group = next((check.group for check in CHECKS if check.name == self.phase), "MPI")
        self._own = replace(finding, group=finding.group or group)
        self.findings.append(self._own)

    @property
    def has_failed(self) -> bool:
        """Whether the child of this rank has hung or crashed."""
        return self._own is not None

    def say_what_is_left(self) -> None:
        """A finding about the checks that no child could carry out, if a child hung or crashed."""
        if self.has_failed and self._left:
            text = f"{', '.join(self._left)}"
            remedy = "run the doctor again when the errors above are gone"
            self.findings.append(Finding(Level.NOTE, "not checked", text, "all checks", remedy, group="The rest"))

    def check(self, *, with_mpi: bool) -> None:
        """Let a child check, and if it does not reach its end, another one without MPI do what is left on this host."""
        if not self._run(mpi=with_mpi) and self._speaks:
            if self.phase in self._left:
                self._left.remove(self.phase)  # it would hang or crash again
            self._run(mpi=False)

    def _run(self, *, mpi: bool) -> bool:
        """Whether the child has carried out all checks."""
        reader, writer = os.pipe()
        work = {"options": self._options, "checks": self._left, "mpi": mpi}
        environment = dict(os.environ) if mpi else environment_of_program()
        command = [*python("mpitrain.tools.doctor.worker"), str(writer), json.dumps(work)]
        os.set_inheritable(writer, True)
        # It inherits all descriptors, because MPICH's ranks talk to their mpirun by one.
        child = subprocess.Popen(command, env=environment, close_fds=False, stdin=subprocess.DEVNULL)
        self._children.append(child)
        os.close(writer)
        try:
            return self._listen(reader, child)
        finally:
            os.close(reader)

    def _listen(self, reader: int, child: subprocess.Popen[bytes]) -> bool:
        over, text = False, b""
        limit_s = 60.0
        end = time.monotonic() + limit_s
        while True:
            if not select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
                self._hangs(child, limit_s)
                return over
            more = os.read(reader, 1 << 16)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "no_mpi" in message:
                    self.phase = START
                    said = message["no_mpi"]
                    expected, remedy = "MPI starts, with all ranks in one job", _MIXED
                    if "expected a launcher" not in said:
                        said, _, rest = said.partition("; expected ")
                        wanted, _, remedy = rest.partition(": ")
                        expected, remedy = wanted or expected, remedy or "do what the text says"
                    self.add(Finding(Level.ERROR, START, said, expected, remedy))
                    with suppress(
                        subprocess.TimeoutExpired
                    ):  # MPI may wait for a rank that did not come; see `end_children`
                        child.wait(_END_S)
                    return False
                if "begin" in message:
                    self.phase, limit_s, self._waits = message["begin"], message["limit_s"], False
                elif "job" in message:
                    self.job = message["job"][0], message["job"][1]
                elif "waits" in message:
                    self._waits = True
                    continue  # the limit is for both
                elif "check" in message:
                    self._left.remove(message["check"])
                    self.findings += [Finding.from_dict(each) for each in message["findings"]]
                    self.facts[message["check"]] = message["facts"]
                over = over or "over" in message
                end = time.monotonic() + limit_s
        return self._ended(child, over, end)

    def _ended(self, child: subprocess.Popen[bytes], over: bool, end: float) -> bool:
        """The child has closed its pipe: it ends now, or hangs in MPI's end."""
        limit_s = max(1.0, end - time.monotonic())
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._hangs(child, limit_s)
            return over
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self.add(
                Finding(
                    Level.ERROR, self.phase, f"the process of this rank {how}", "no crash", self._remedy(crashed=True)
                )
            )
        return over

    def _hangs(self, child: subprocess.Popen[bytes], limit_s: float) -> None:
        state = _STATES.get(_state(child.pid), "")
        self._waits = self._waits and not state
        whose = "another rank has not ended it" if self._waits else f"no end on {os.uname().nodename}"
        found = f"{whose} within {limit_s:g} s{state and f'; the process {state}'}"
        self.add(Finding(Level.ERROR, self.phase, found, "an answer of all ranks", self._remedy()))

    def _remedy(self, *, crashed: bool = False) -> str:
        """What to do if this phase hangs or crashes."""
        if (
            self.phase == START
            and is_on(os.environ.get(ULFM_VARIABLE, ""))
            and "ucx" in os.environ.get(PML, "").split(",")
        ):
            return (
                f"mpirun --with-ft ulfm --mca pml ob1: UCX is off under ULFM, and {PML}={os.environ[PML]} asks for it"
            )
        if self.phase == START and crashed:
            return f"see what MPI printed; if it speaks of PMI, PMIx or a launcher, {_MIXED}"
        found = next((check.remedy for check in CHECKS if check.name == self.phase), None)
        return _REMEDIES.get(self.phase) or found or "see the text above"

    def speak_for_rank(self, rank: int) -> int:
        """On another rank than 0: a line about a hang or crash here, after which rank 0 has time for its report."""
        if self._own is None or "expected a launcher" in self._own.found:
            return 0  # rank 0's exit code counts
        found = f"mpitrain doctor: rank {rank} on {os.uname().nodename}: {self._own.topic}: {self._own.found}"
        with suppress(EndedBySignal):
            if not self._waits:
                print(found, file=sys.stderr, flush=True)
            time.sleep(_GRACE_S if "PMIX_RANK" in os.environ else _HYDRA_GRACE_S)
        self.end_children()
        return 1

    def end_children(self) -> None:
        """End the children that hang."""
        for child in self._children:
            with suppress(subprocess.TimeoutExpired, EndedBySignal):  # a child in the kernel's sleep outlives this
                if child.poll() is None:
                    child.kill()
                    child.wait(1.0)
