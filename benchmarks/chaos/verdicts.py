"""What is expected of a job that was harmed. A verdict notes its figures in the outcome, and returns what is wrong, or ""."""

import datetime
import math
import re
import subprocess
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

import ckpt
from benchmarks.chaos.disk import free_up
from benchmarks.chaos.harms import Harm
from collectives.programs import python
from mpitrain.job.elastic.copies.files import files_of
from mpitrain.job.elastic.lease import read_lease
from mpitrain.job.record.files.events import REGULAR
from mpitrain.job.record.parsing.events import read_events
from mpitrain.job.record.stragglers import CAUSES
from mpitrain.tools.bench.jobs.job import BenchJob

_TOLERANCE = 1e-5
"""Relative, of the losses of the ten steps from a recovery on: fewer ranks add in another order."""
_LATER = 1e-3  # of later losses, because the differences grow while the model trains
_NUM_CLOSE = 10
_LONGEST_S = 15.0  # of a recovery
_DEAREST = 0.02  # of the time, for checks and for copies


class Outcome(msgspec.Struct):
    """The result of a trial. Times are seconds; None: the trial has none."""

    case: str
    seed: int
    ok: bool
    problem: str = ""
    noticed_s: float | None = None  # from the harm to the notice of a rank
    recovered_s: float | None = None  # from the notice to the end of the first step after it
    repeated: int | None = None  # steps that were done again
    note: str = ""


class Facts(NamedTuple):
    """A job that has ended. `code`: its exit code, None if it stood still. `reference`: the losses of an undisturbed run, by step.

    `start`: starts another job with the same arguments, and waits for its end.
    """

    job: BenchJob
    code: int | None
    harm: Harm
    reference: Mapping[int, float]
    start: Callable[[], tuple[BenchJob, int | None]]


Verdict = Callable[[Facts, Outcome], str]


def goes_on(max_repeated: int) -> Verdict:
    """The job goes on in place, and ends as an undisturbed one."""

    def verdict(facts: Facts, outcome: Outcome) -> str:
        restored = [event for event in facts.job.events("restore") if _seconds(event["time"]) > facts.harm.at]
        if restored:
            last = restored[-1]
            outcome.recovered_s = last["cost_s"]
            outcome.noticed_s = round(_seconds(last["time"]) - last["cost_s"] - facts.harm.at, 3)
            outcome.repeated = max(facts.harm.step - (last["step"] - 1), 0)
            if last["cost_s"] > _LONGEST_S:
                return f"the recovery took {last['cost_s']} s; expected {_LONGEST_S} s at most"
        starts = [event["step"] for event in facts.job.events("restore")]
        return (
            _of_code(facts)
            or ("" if starts else "no recovery took place")
            or _of_end(facts, outcome, starts, max_repeated)
        )

    return verdict


def keeps_its_ring(max_repeated: int, within_s: float) -> Verdict:
    """All ranks connect although another user attacks their listeners, a death is noticed in time, and the job goes on in place.

    The note says what the other user has done.
    """

    def verdict(facts: Facts, outcome: Outcome) -> str:
        said = re.findall(r"stranger: user (\d+), \S+ (\d+) made, (\d+) refused", facts.job.output)
        made, refused = (sum(int(each[i]) for each in said) for i in (1, 2))
        outcome.note = (
            f"user {', '.join(sorted({each[0] for each in said}))}: {made} connections made, {refused} refused"
        )
        if not made + refused or "stranger: no answer" in facts.job.output:
            return f"not every listener was attacked: {outcome.note}"
        if missing := re.findall(r".*(?:no connection from|cannot connect|no further copies).*", facts.job.output):
            return f"ranks have no connection: {missing[:3]}"
        problem = goes_on(max_repeated)(facts, outcome)
        if not problem and (outcome.noticed_s is None or outcome.noticed_s > within_s):
            return f"the death was noticed after {outcome.noticed_s} s; expected {within_s} s at most"
        return problem

    return verdict


def is_started_again(max_repeated: int, within_s: float) -> Verdict:
    """The supervisor starts the job again, which ends as an undisturbed one. `noticed_s`: to the end of the job by the supervisor."""

    def verdict(facts: Facts, outcome: Outcome) -> str:
        relaunches = facts.job.events("relaunch")
        if problem := _of_code(facts):
            return problem
        if not relaunches:
            return "the job was not started again"
        outcome.recovered_s = relaunches[-1]["cost_s"]
        outcome.noticed_s = round(_seconds(relaunches[-1]["time"]) - outcome.recovered_s - facts.harm.at, 3)
        first = relaunches[-1]["step"]
        outcome.repeated = max(facts.harm.step - (first - 1), 0)
        if outcome.recovered_s > within_s:
            return f"the first step came {outcome.recovered_s} s after the notice; expected {within_s} s at most"
        return _of_end(facts, outcome, [first], max_repeated)

    return verdict


def is_named(deadline_s: float, within_s: float) -> Verdict:
    """The job ends, and its report names the rank. `noticed_s` counts from the deadline on."""

    def verdict(facts: Facts, outcome: Outcome) -> str:
        report = facts.job.run / "failure.txt"
        if facts.code in (0, None):
            return _of_code(facts) or "the job ended with exit code 0"
        if not report.exists():
            return "there is no failure.txt"
        outcome.noticed_s = round(report.stat().st_mtime - facts.harm.at - deadline_s, 3)
        verdicts = re.findall(r"=> missing: (.*)", report.read_text())
        named = [re.findall(r"ranks? ([-\d, ]+) on \S+ \(process", words) for words in verdicts]
        if named != [[str(facts.harm.rank)]]:
            return f"the report says {verdicts}; expected rank {facts.harm.rank}"
        if outcome.noticed_s > within_s:
            return f"the report came {outcome.noticed_s} s after the deadline; expected {within_s} s at most"
        return _of_remains(facts.job)

    return verdict


def is_found(every: int) -> Verdict:
    """The job ends at the next check, and its error names the rank."""

    def verdict(facts: Facts, outcome: Outcome) -> str:
        check = -(-(facts.harm.step + 1) // every) * every
        said = re.search(r"mpitrain: error: step (\d+): (.*)", facts.job.output)
        if facts.code in (0, None) or said is None:
            return _of_code(facts) or "the job ended with exit code 0, and without an error"
        if int(said[1]) > check:
            return f"step {said[1]} found the flip; expected step {check} at the latest"
        if re.findall(r"rank (\d+) on ", said[2]) != [str(facts.harm.rank)]:
            return f"the error says {said[0]!r}; expected rank {facts.harm.rank}"
        return _of_remains(facts.job)

    return verdict


def is_resumed(*, leaves_copies: bool = False, leaves_stages: bool = False) -> Verdict:
    """The job ends and leaves a clean state. The same command goes on, and its losses are those of an undisturbed run, bit for bit.

    `leaves_stages`: the first job had no time to remove the folder of a checkpoint that it was saving. The second one removes it.
    """

    def verdict(facts: Facts, outcome: Outcome) -> str:
        outcome.note = f"exit code {facts.code}"
        if facts.code is None:
            return "the job stood still"
        if problem := _of_remains(facts.job, leaves_copies=leaves_copies, leaves_stages=leaves_stages):
            return problem
        if facts.code != 0 and len(facts.job.steps()) == len(facts.reference):
            return f"exit code {facts.code} after the last step"
        job, code = facts.start()
        if code != 0:
            return f"the next job ended with exit code {code}:\n{job.output}"
        if job.steps() != facts.reference:
            return "the losses differ from those of an undisturbed run"
        kept = ckpt.list_checkpoints(job.run / "checkpoints")
        if not kept or any(not checkpoint.complete for checkpoint in kept):
            return f"checkpoints {kept} are not all complete"
        return _of_remains(job)

    return verdict


def is_refused_and_resumed(facts: Facts, outcome: Outcome) -> str:
    """The job ends with an error that names the full disk, and leaves a clean state. With room again, the same command goes on."""
    if facts.code == 0 or "No space left on device" not in facts.job.output:
        return _of_code(facts) or "the job did not say that the disk is full"
    free_up(facts.job)
    return is_resumed()(facts, outcome)


def is_silent(facts: Facts, outcome: Outcome) -> str:
    """No fault is reported, and the costs of checks and copies, by their own clocks, are 2 % each at most. The note has them."""
    lines = [line for line in facts.job.metrics() if "step_s" in line]
    if problem := _of_code(facts):
        return problem
    checks = sum(line.get("check_s", 0.0) for line in lines) / sum(line["step_s"] for line in lines)
    said = re.search(r"copies of the state have held up the training for (([\d.]+)%.*)", facts.job.output)
    if said is None:
        return "the job does not say what its copies have cost"
    outcome.note = f"{len(lines)} steps, checks {checks:.2%}, copies {said[1].strip()}"
    if max(checks, float(said[2]) / 100) > _DEAREST:
        return f"checks and copies may take {_DEAREST:.0%} of the time each: {outcome.note}"
    wrong = _alarms(facts.job, r"|.*\b(?:spike|straggl)")
    events = _faults(facts.job)
    return f"it reported {events}: {wrong[:5]}" if events or wrong else _of_remains(facts.job)


def names_stragglers_alone(facts: Facts, outcome: Outcome) -> str:
    """No fault is reported, but ranks that are slow."""
    if problem := _of_code(facts):
        return problem
    events = _faults(facts.job)
    outcome.note = f"{len(facts.job.steps())} steps, {len(events)} stragglers"
    wrong = sorted({*events} - {"straggler"}) + _alarms(facts.job)
    return f"it reported {wrong}" if wrong else _of_remains(facts.job)


def names_slow_rank(cause: str) -> Verdict:
    """The run names the rank that was slowed down, and no other, with the cause. So do report, watch and profile.

    `noticed_s`: from the first slow step on.
    """

    def verdict(facts: Facts, outcome: Outcome) -> str:
        if problem := _of_code(facts):
            return problem
        found = facts.job.events("straggler")
        outcome.note = "; ".join(f"rank {each['rank']}, {each['factor']:.2f} times, {each['cause']}" for each in found)
        if {(each["rank"], each["cause"]) for each in found} != {(facts.harm.rank, cause)}:
            return f"it named {outcome.note or 'none'}; expected rank {facts.harm.rank}, {cause}"
        outcome.noticed_s = round(_seconds(found[0]["time"]) - facts.harm.at, 3)
        page = facts.job.run / "report.html"
        for words in (["report", "--out", str(page)], ["watch", "--once", "--width", "200"], ["profile"]):
            command = [*python("mpitrain"), words[0], str(facts.job.run), *words[1:]]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
            text = " ".join((page.read_text() if words[0] == "report" else shown.stdout).split())
            if shown.returncode or f"rank {facts.harm.rank}" not in text or CAUSES[cause] not in text:
                return f"{words[0]} does not name the rank with its cause: {shown.stderr or shown.stdout}"
        return _of_remains(facts.job)

    return verdict


def _faults(job: BenchJob) -> list[str]:
    """The events that a run without faults has not."""
    return [event["event"] for event in read_events(job.run) if event["event"] not in REGULAR]


def _alarms(job: BenchJob, others: str = "") -> list[str]:
    """The lines by which ranks report something. `others`: a pattern of further ones."""
    return [line for line in job.output.splitlines() if re.match(rf"\[rank|notice{others}", line)]


def _of_code(facts: Facts) -> str:
    if facts.code is None:
        return "the job stood still"
    return f"the job ended with exit code {facts.code}" if facts.code else ""


def _of_end(facts: Facts, outcome: Outcome, starts: list[int], max_repeated: int) -> str:
    """What is wrong with the steps of a job that has gone on from the first steps `starts`."""
    job, reference = facts.job, facts.reference
    steps = job.steps()
    if missing := sorted(set(reference) - set(steps)):
        return f"steps {missing[:5]} are not in the metrics"
    numbers = [line["step"] for line in job.metrics() if "loss" in line]
    if numbers != sorted(set(numbers)):
        return "metrics.jsonl has the lines of two writers"
    for step, loss in reference.items():
        is_close = step < min(starts) or any(0 <= step - first < _NUM_CLOSE for first in starts)
        if not math.isclose(steps[step], loss, rel_tol=_TOLERANCE if is_close else _LATER):
            return f"the loss of step {step} is {steps[step]}; undisturbed it is {loss}"
    if (outcome.repeated or 0) > max_repeated:
        return f"{outcome.repeated} steps were done again; expected at most {max_repeated}"
    return _of_remains(job)


def _of_remains(job: BenchJob, *, leaves_copies: bool = False, leaves_stages: bool = False) -> str:
    """What a job has left behind that it should not."""
    if not job.wait_until_left_alone(10.0):
        return f"processes {job.left()} are left"
    if not leaves_stages and (staging := [path.name for path in job.run.glob("checkpoints/.*") if path.is_dir()]):
        return f"{staging} is left"
    lease = read_lease(job.run)
    if not leaves_copies and lease is not None and (copies := [path.name for path in files_of(lease.run)]):
        return f"{copies} are left in node memory"
    return ""


def _seconds(time_: str) -> float:
    return datetime.datetime.fromisoformat(time_).timestamp()
