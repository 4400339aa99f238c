"""The sequence of launches of one run."""

import contextlib
import os
import signal
import time
import uuid
from dataclasses import replace
from typing import Any

from mpitrain.job.elastic.copies.remote import script
from mpitrain.job.elastic.supervisor.batch import GOES_ON, Queue, ending_state, job_state
from mpitrain.job.elastic.supervisor.decisions import LaunchOutcome, LaunchProgress, Next, decide
from mpitrain.job.elastic.supervisor.folder import RunFolder
from mpitrain.job.elastic.supervisor.hosts import as_list, num_ranks
from mpitrain.job.elastic.supervisor.launch.job import RunningJob
from mpitrain.job.elastic.supervisor.launch.limits import LaunchWatch, PhaseLimits
from mpitrain.job.elastic.supervisor.launch.memory_kills import NAMED, LaunchKills
from mpitrain.job.elastic.supervisor.live_hosts import LiveHosts
from mpitrain.job.elastic.supervisor.mpi_files.segments import Segment, find_segments, remove_segments
from mpitrain.job.elastic.supervisor.mpi_files.sessions import Sessions
from mpitrain.job.elastic.supervisor.plan import SupervisorPlan
from mpitrain.job.elastic.supervisor.requests import SignalRequests
from mpitrain.job.elastic.supervisor.texts import say
from mpitrain.job.elastic.supervisor.words import resume_of
from mpitrain.job.record.files.alerts import Alerts
from mpitrain.job.record.files.events import write_event
from mpitrain.job.record.files.marks import SUPERVISOR_VARIABLE, VARIABLES

_LOOK_S = 0.1
_HOSTS_S = 5.0  # between two looks for hosts, without which no launch is possible
_LIMIT_HINT = "Is the job's --time longer than the lead of --signal, and the start of the run?"
_HOSTS_HINT = "Does --nodes ask for more hosts than answer?"
_REPORTED_END_S = 1.0
"""For mpirun's end after a report: it may wait for a host that does not answer."""
_MAX_MARKED = 32
"""With more than 64 hosts, daemons of Open MPI start others, and lose what follows a = in their settings. Without the id they are not
found after a failure, but end by themselves as soon as they miss mpirun."""
_FOREIGN = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_RANK", "PMIX_SERVER", "PMIX_NAMESPACE", "PMI_RANK", "PMI_FD")
"""Variables of a launcher around the supervisor: mpirun would take itself for a rank."""


class Supervisor:
    """Starts the job of a plan until its run has come to an end, or the signals in `requests` ask for one."""

    def __init__(self, plan: SupervisorPlan, folder: RunFolder, requests: SignalRequests) -> None:
        self.plan, self.folder = plan, folder
        self.id = uuid.uuid4().hex
        self._requests = requests
        self._queue = Queue(folder.path, say)
        self._begins_with_given = resume_of(plan.command.program) not in ("auto", "never")
        if self._begins_with_given:
            folder.earlier = self._queue.earlier(folder.earlier)
        self._queue.go_on_from(self._newest_saved())
        self._progress = LaunchProgress()
        self._slow_launches = 0
        self._down_since: float | None = None  # since the end of the last job
        self._reason = "first launch"
        self._is_stopped_early = False  # before the first step of the launch
        # The greatest step, and that of the newest checkpoint, before a launch that was stopped early.
        self._reached = self._saved = 0
        self._segments: set[Segment] = set()
        self._sessions = Sessions()
        self._hosts = LiveHosts(plan, self.id, self._sessions)

    def run(self) -> int:
        """Launch after launch; returns the exit code, which is 0 only if the run has left its mark of completion."""
        try:
            while not self._requests.stop:
                if not self._hosts.are_probed:
                    self._hosts.probe()
                if not self._hosts.are_enough() and not self._await_hosts():
                    if self._requests.stop:
                        break
                    return self._give_up()
                outcome = self._launch()
                if self._requests.end:
                    break
                following = decide(self.plan.policy, self._progress, outcome)
                self._report(outcome, following)
                self._progress, self._reason = following.progress, following.text
                # A run that is asked to stop before its first step may do that one: as many jobs as it has steps would be no help.
                if not self._is_stopped_early:
                    self._reached, self._saved = self._progress.best_step, self._newest_saved()
                if outcome.does_not_fit(self._progress) and self._hosts.are_fewer():
                    self._hosts.least = len(self._hosts.chosen) + 1
                if following.action == "end":
                    return self._leave(following, outcome)
                self._pause(following.pause_s)
            if self.plan.requeue and not self._requests.end and self._is_stopped_by_slurm():
                self._requeue(_LIMIT_HINT)  # in a pause
            return 128 + (self._requests.end or self._requests.stop)
        finally:
            self._hosts.clean()
            for line in self._sessions.remaining():
                say(line)
            self.folder.close()

    # One launch

    def _launch(self) -> LaunchOutcome:
        """One launch, from its start to the end of all its processes."""
        plan, folder = self.plan, self.folder
        self._hosts.begin_launch()
        variables = folder.prepare(self.id)
        words = self._words(variables)
        ranks = num_ranks(plan.command.ranks, plan.hosts, self._hosts.chosen) if plan.hosts else plan.command.ranks
        where = f" on {as_list(self._hosts.chosen)}" if self._hosts.chosen else ""
        say(f"launch {folder.launch}{where}" + (f", {ranks} ranks" if ranks else ""))
        env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)} | variables
        env |= self._sessions.begin(plan.command, env, (host.name for host in self._hosts.chosen))
        if plan.command.kind == "openmpi" and 0 < len(self._hosts.chosen) <= _MAX_MARKED and "SLURM_JOB_ID" not in env:
            # Its daemons on other hosts get the id of this supervisor as well. srun passes it on anyway.
            for name, daemon in (("PRTE_MCA_prte_launch_agent", "prted"), ("OMPI_MCA_orte_launch_agent", "orted")):
                env.setdefault(name, f"env {SUPERVISOR_VARIABLE}={self.id} {daemon}")
        self._segments = set()
        began = time.time()
        kills = LaunchKills()
        job = RunningJob(words, env)
        watch = LaunchWatch(self._limits(), folder.launch, time.monotonic())
        has_fewer = self._hosts.are_fewer()  # not later: a probe at the end may find others
        stop, problem = self._attend(job, watch, kills)
        if self._requests.end:
            say("ending now")
        ended = time.monotonic()
        # After its report a job has nothing more to say, and its ranks end themselves.
        job.end(_REPORTED_END_S if folder.report() is not None else plan.limits.end_s)
        self._slow_launches = self._slow_launches + 1 if problem and watch.alive is None else 0
        done = folder.done()
        if done is not None:
            self._tell_of_first_step(watch)  # of a launch so short that its first step was not seen
        # Slurm's SIGTERM goes to the ranks, too, and its SIGKILL to what is left: then no rank was lost, and no host answers any more.
        state = ending_state() if done is None else ""
        if done is None or problem or stop == "rejoin" or self._requests.end:  # else all has ended by itself
            if not state:
                self._hosts.probe()
            remove_segments(self._segments, began)
            folder.break_lock(watch.alive)
        else:
            self._hosts.clean()
        if self._down_since is None:
            self._down_since = ended
        step = watch.alive.step if watch.alive is not None else 0
        problem = problem or f"the job ended without its mark of completion (exit code {job.code})"
        if done is None and (killed := kills.words()) and NAMED not in folder.report_text():
            problem += f"; {killed}"
        if state:
            stop, problem = "batch", f"Slurm ends this job ({state})"
        return LaunchOutcome(done, step, stop, problem, is_reduced=watch.trains or has_fewer)

    def _attend(self, job: RunningJob, watch: LaunchWatch, kills: LaunchKills) -> tuple[Any, str]:
        """Wait until the job has ended, hangs or must be ended; returns who asked it to stop, and what stands still."""
        stop, told, trained = "", False, False
        look_for_hosts = time.monotonic() + self.plan.rejoin_s
        while job.code is None and not self._requests.end:
            job.wait(_LOOK_S)
            now = time.monotonic()
            is_done = self.folder.done() is not None
            problem = watch.see(now, *self.folder.sign_of_life(), self.folder.report(), is_done=is_done)
            kills.see(watch.alive)
            if problem:
                return stop, problem
            if watch.trains and not trained:
                trained = True
                self._segments = find_segments(self.id)
                self._tell_of_first_step(watch)
            for _ in range(self._requests.take_records()):
                job.signal(signal.SIGUSR2)
            if watch.trains and not stop and self._hosts.missing() and now > look_for_hosts:
                look_for_hosts = now + self.plan.rejoin_s
                if self._hosts.are_back():
                    stop = "rejoin"
                    say(
                        f"{', '.join(self._hosts.missing())} can rejoin: the run saves and stops for a relaunch on more hosts"
                    )
            if self._requests.stop and stop != "user":
                stop, self._is_stopped_early = "user", not watch.trains
                again = "Ctrl-C" if self._requests.in_batch_job else "Ctrl-C or SIGTERM"
                say(f"stopping: the ranks save a checkpoint and end (a second {again} ends them now, without one)")
            if stop and not told:
                self.folder.ask_to_stop()
                # A rank without a handler would die of the signal. It looks for the file later; once rank 0 trains, all have a handler.
                if watch.alive is not None and watch.alive.phase != "starting":
                    job.signal(signal.SIGUSR1)
                    told = True
        return stop, ""

    def _words(self, variables: dict[str, str]) -> list[str]:
        command = self.plan.command
        if self._hosts.chosen and (tuple(self._hosts.chosen) != self.plan.hosts or not command.hosts):
            command = command.on(self._hosts.chosen, num_ranks(command.ranks, self.plan.hosts, self._hosts.chosen))
        if command.kind == "openmpi":
            command = command.with_options(*(word for name in variables for word in ("-x", name)))
        elif command.kind == "mpich":  # for other hosts, if -genvnone or -genvlist keeps variables from them
            command = command.with_options(*(word for pair in variables.items() for word in ("-genv", *pair)))
        if (start := self._start()) is not None:
            command = command.resumed_from(start)
        return command.words()

    def _start(self) -> str | None:
        """The start of a relaunch, if the command's own would lose what this run has done."""
        resume = resume_of(self.plan.command.program)
        if resume == "auto":
            return None
        # "never" gave the folder of an earlier run another name before the first step: once is enough.
        return self.folder.own_start() or ("auto" if resume == "never" and self._progress.best_step else None)

    def _limits(self) -> PhaseLimits:
        limits = self.plan.limits
        return replace(limits, launch_s=limits.launch_s * 2.0 ** min(self._slow_launches, 6))

    def _await_hosts(self) -> bool:
        """Wait until enough hosts answer; whether they do. A host may take minutes to start again."""
        limit_s = self.plan.limits.hosts_s
        say(f"{self._hosts.too_few()}; waiting up to {limit_s:g} s for more")
        until = time.monotonic() + limit_s
        while not self._hosts.are_enough() and time.monotonic() < until and not self._requests.stop:
            self._pause(min(_HOSTS_S, limit_s))
            self._hosts.probe()
        return self._hosts.are_enough()

    # Reports

    def _tell_of_first_step(self, watch: LaunchWatch) -> None:
        if self._down_since is None:
            return
        self._event(
            "relaunch",
            cost_s=round(time.monotonic() - self._down_since, 3),
            step=watch.alive.step if watch.alive is not None else None,
            hosts=[host.name for host in self._hosts.chosen],
            reason=self._reason,
        )
        self._down_since = None

    def _report(self, outcome: LaunchOutcome, following: Next) -> None:
        """The report of the ranks, and one line: the last text that is printed about a launch."""
        if outcome.done is None and outcome.stop != "batch":
            text = self.folder.report_text()
            if text:
                say(f"the report of launch {self.folder.launch}:", text)
            said = text.splitlines()[1:2]  # the first line is the time
            self._event("failure", problem=outcome.problem, step=outcome.step, report=said[0] if said else None)
        say(following.text)

    def _event(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk
            written = write_event(self.folder.path, event, launch=self.folder.launch, **fields)
            if (command := self.plan.on_event) is not None:
                # Another supervisor, in whose job this one runs, must not end it.
                environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
                Alerts(command, self.folder.path, say, environment=environment).tell(written)

    # The end

    def _pause(self, pause_s: float) -> None:
        """Wait, unless a signal asks to stop meanwhile."""
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._requests.stop:
            time.sleep(_LOOK_S)
            self._hosts.are_probed = False  # hosts may come and go

    def _leave(self, following: Next, outcome: LaunchOutcome) -> int:
        stopped = outcome.done is not None and outcome.done.reason == "stopped"
        by_slurm = stopped and self.plan.requeue and self._is_stopped_by_slurm()
        lacks_hosts = following.code != 0 and not self._requests.stop and not self._hosts.are_enough()
        if outcome.done is not None and outcome.done.reason in ("finished", "stopped"):
            self._remove_copies()
        hint = _HOSTS_HINT if lacks_hosts else _LIMIT_HINT
        if (by_slurm or lacks_hosts) and self.plan.requeue and not self._requeue(hint):
            return following.code or 1
        if following.code and self._requests.stop not in (0, signal.SIGUSR1):
            return 128 + self._requests.stop
        return following.code

    def _is_stopped_by_slurm(self) -> bool:
        """Whether the run was asked to stop ahead of the limit of time, or at the begin of the GraceTime of a preemption.

        Slurm sends SIGTERM at that begin, to the ranks alone. At the end of the GraceTime it queues the job again, but not if the job
        has ended well before.
        """
        if self._requests.stop not in (0, signal.SIGTERM):
            return self._requests.stop == signal.SIGUSR1
        if not (state := job_state()):
            say("Slurm does not tell the state of this job, which it may be ending: not queued again")
        return state in GOES_ON

    def _remove_copies(self) -> None:
        """The run has ended with a checkpoint: remove the copies of its state that are left on hosts."""
        if (run := self.folder.run_id()) is not None:
            counts = self._hosts.count(script(run))
            if num := sum(counts.values()):
                say(f"removed {num} file{'s' * (num != 1)} of copies that the run had left in node memory")

    def _give_up(self) -> int:
        """Too few hosts answer: in Slurm the job may wait in the queue for others."""
        problem = f"{self._hosts.too_few()} within {self.plan.limits.hosts_s:g} s"
        self._event("failure", problem=problem)
        say(f"{problem}; giving up")
        self._requeue(_HOSTS_HINT)
        return 1

    def _newest_saved(self) -> int:
        return self.folder.newest_step(own=self._begins_with_given)

    def _requeue(self, hint: str) -> bool:
        """Have Slurm queue this job again, if that was asked for; whether it does. Slurm then ends it, so nothing may follow."""
        if not self.plan.requeue:
            return False
        self._hosts.clean()
        queue = self._queue
        has_new_step = self._reached > queue.best_step or self._saved > queue.best_saved
        step, saved = self._progress.best_step, self._newest_saved()
        return queue.enter(has_new_step=has_new_step, step=step, saved=saved, hint=hint)
