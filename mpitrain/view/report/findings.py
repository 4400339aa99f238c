"""What stands out in a run, in words. Pure.

Slow ranks, spikes and failures are those that the run itself has recorded as events: a report has no second rule for them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.job.record.parsing.numbers import in_words, steps_in_words
from mpitrain.job.record.parsing.words import counted
from mpitrain.view.reading.run import NO_END, Event, RunRecord
from mpitrain.view.report.marks import describe

WARM_UP = 3
"""The first steps, which are slower anyway."""
SLOW = 2.0
"""A step that takes so many times the median is slow."""
MUCH_DATA, MUCH_COMM, MUCH_SAVING = 0.05, 0.3, 0.05
"""Shares of the time of the steps."""
MANY_CLIPPED = 0.3
"""Share of the steps."""
RISE = 0.01
"""A held-out loss that is so much above its best one, in proportion, has risen."""


class RunFinding(NamedTuple):
    """A sentence about a run. `weight`: 2 for what broke or cost much, 1 for what deserves a look, 0 for what is worth knowing."""

    weight: int
    text: str
    steps: tuple[int, int] | None = None
    """The first and the last step of which it tells."""


def findings(run: RunRecord) -> list[RunFinding]:
    """What stands out, the most important first. Never empty."""
    found = [*_failures(run), *_stragglers(run), *_spikes(run), *_throttling(run)]
    if len(run.steps):
        found += [*_skipped(run), *_slow_steps(run), *_shares(run), *_clipped(run)]
    found += [*_held_out(run), *(RunFinding(0, note) for note in run.notes)]
    if not len(run.steps):
        found.append(RunFinding(0, "The run has no step yet."))
    elif not any(finding.weight for finding in found):
        found.insert(0, RunFinding(0, "Nothing is wrong: no slow rank, spike, skipped step or failure."))
    return sorted(found, key=lambda finding: -finding.weight)


def _of(run: RunRecord, *kinds: str) -> list[Event]:
    return [event for event in run.events if event.kind in kinds]


def _range(events: Sequence[Event]) -> tuple[int, int] | None:
    steps = [event.step for event in events if event.step is not None]
    return (min(steps), max(steps)) if steps else None


def _failures(run: RunRecord) -> Iterator[RunFinding]:
    failures = _of(run, "failure", "desync", "flipped_bit")
    for event in failures[:10]:
        yield RunFinding(2, describe(event), _range([event]))
    if failures[10:]:
        yield RunFinding(2, f"{len(failures) - 10} more failures are in the table of events.", _range(failures[10:]))
    recoveries = _of(run, "shrink", "restore", "relaunch", "rewind")
    if run.state == NO_END:
        yield RunFinding(1, "The record has no end: the run still goes on, or was killed.")
    if recoveries:
        cost_s = sum(event.cost_s or 0.0 for event in recoveries)
        kinds = [
            counted(len(of), kind) for kind in ("shrink", "restore", "relaunch", "rewind") if (of := _of(run, kind))
        ]
        yield RunFinding(1, f"The run recovered: {', '.join(kinds)}. This cost {cost_s:,.1f} s.", _range(recoveries))


def _stragglers(run: RunRecord) -> Iterator[RunFinding]:
    by_rank = defaultdict(list)
    for event in _of(run, "straggler"):
        by_rank[event.rank, event.host, str(event.fields.get("cause") or "")].append(event)
    for (rank, host, cause), events in by_rank.items():
        where = f"rank {rank}" + (f" on {host}" if host else "")
        factors = [its for event in events if isinstance(its := event.fields.get("factor"), int | float)]
        much = f"{max(factors):.2f} times as slow as the other ranks" if factors else "slower than the other ranks"
        why = f" The cause: {events[-1].fields.get('words') or cause}." if cause else ""
        cost_s = sum(event.cost_s or 0.0 for event in events)
        cost = f" The others waited {cost_s:,.1f} s for it until then." if cost_s else ""
        steps = steps_in_words([event.step for event in events if event.step is not None])
        told = f" (told at {steps})" if steps else ""
        yield RunFinding(2, f"Slow rank: {where} was {much}{told}.{why}{cost}", _range(events))


def _spikes(run: RunRecord) -> Iterator[RunFinding]:
    events = _of(run, "spike")
    if events:
        of = {what for event in events for what in (event.fields.get("what") or ())}
        names = " and ".join(sorted(of)).replace("_", " ") or "loss or gradient norm"
        left_out = sum(bool(event.fields.get("skipped")) for event in events)
        then = f" {counted(left_out, 'step')} of them left out." if left_out else ""
        steps = steps_in_words([event.step for event in events if event.step is not None])
        yield RunFinding(2, f"{counted(len(events), 'spike')} of {names}: {steps}.{then}", _range(events))


def _throttling(run: RunRecord) -> Iterator[RunFinding]:
    throttled = run.gauges.columns.get("gpu_throttled")
    if throttled is None or not len(throttled):
        return
    is_throttled = np.nan_to_num(throttled) > 0
    ranks = np.flatnonzero(is_throttled.any(axis=0))
    if len(ranks):
        rows = np.flatnonzero(is_throttled.any(axis=1))
        share = is_throttled[:, ranks].mean()
        names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        first, last = int(run.gauges.step[rows[0]]), int(run.gauges.step[rows[-1]])
        heat = run.gauges.columns.get("gpu_celsius")
        warm = (
            ""
            if heat is None or not np.isfinite(heat[:, ranks]).any()
            else f", at up to {np.nanmax(heat[:, ranks]):.0f} °C"
        )
        yield RunFinding(
            2,
            f"Throttling: the GPU of rank{'s' * (len(ranks) > 1)} {names} ran below its clock in {share:.0%} of the samples, "
            f"first at step {first:,}{warm}. Look at its cooling and its power limit.",
            (first, last),
        )


def _skipped(run: RunRecord) -> Iterator[RunFinding]:
    rows = np.flatnonzero(np.nan_to_num(run.steps.column("skipped")) > 0)
    if len(rows):
        steps = run.steps.step[rows].tolist()
        were = "step was" if len(rows) == 1 else "steps were"
        yield RunFinding(
            2 if len(rows) > 0.01 * len(run.steps) else 1,
            f"{len(rows):,} of {len(run.steps):,} {were} skipped, because of loss or gradient: {steps_in_words(steps)}.",
            (steps[0], steps[-1]),
        )


def _slow_steps(run: RunRecord) -> Iterator[RunFinding]:
    step_s, steps = run.steps.column("step_s")[WARM_UP:], run.steps.step[WARM_UP:]
    if len(step_s) < 10 or not np.isfinite(step_s).any():
        return
    usual = float(np.nanmedian(step_s))
    rows = np.flatnonzero(np.nan_to_num(step_s) > SLOW * usual)
    if not len(rows):
        return
    lost = float((step_s[rows] - usual).sum())
    share = lost / float(np.nansum(step_s))
    slow = steps[rows].tolist()
    yield RunFinding(
        1 if share > 0.01 else 0,
        f"{len(rows):,} of {len(step_s):,} steps took more than {SLOW:g} times the median of {in_words(usual)}: "
        f"{steps_in_words(slow)}. They cost {lost:,.1f} s ({share:.1%} of the time).",
        (slow[0], slow[-1]),
    )


def _shares(run: RunRecord) -> Iterator[RunFinding]:
    total = float(np.nansum(run.steps.column("step_s")))
    if total <= 0:
        return
    data = float(np.nansum(run.steps.column("data_s"))) / total
    comm = float(np.nansum(run.steps.column("comm_s"))) / total
    if data > MUCH_DATA:
        advice = "Try more data.processes, or data that are decoded before the run."
        yield RunFinding(1, f"Data waits: {data:.1%} of the time of rank 0's steps. {advice}")
    if comm > MUCH_COMM:
        yield RunFinding(
            1,
            f"Communication and waits for other ranks take {comm:.0%} of the time of rank 0's steps. "
            "`python -m mpitrain profile` says what waits for what.",
        )
    saves = _of(run, "save")
    saving = sum(event.cost_s or 0.0 for event in saves)
    if len(saves) > 1 and saving > MUCH_SAVING * total:
        yield RunFinding(
            1,
            f"Checkpoints held the training up for {saving:,.1f} s ({saving / total:.0%}). Try a larger checkpoint.every.",
        )
    if data <= MUCH_DATA and comm <= MUCH_COMM:
        yield RunFinding(
            0, f"Of the time of rank 0's steps, {comm:.1%} is communication and waiting, and {data:.1%} is data."
        )


def _clipped(run: RunRecord) -> Iterator[RunFinding]:
    norms = run.steps.column("grad_norm")
    norms = norms[np.isfinite(norms)]
    limit = run.settings.get("optim.clip_norm")
    if not isinstance(limit, int | float) or limit <= 0 or not len(norms):
        return
    share = float((norms > limit).mean())
    if share > MANY_CLIPPED:
        yield RunFinding(
            1,
            f"{share:.0%} of the gradients were longer than optim.clip_norm = {limit:g} (median {np.median(norms):.3g}), "
            "and were scaled down.",
        )


def _held_out(run: RunRecord) -> Iterator[RunFinding]:
    loss = run.evaluations.column("heldout_loss")
    if not np.isfinite(loss).any():
        return
    best = int(np.nanargmin(loss))
    step = int(run.evaluations.step[best])
    if best < len(loss) - 2 and loss[-1] > (1 + RISE) * loss[best]:
        yield RunFinding(
            1,
            f"The held-out loss was best at step {step:,} ({loss[best]:.4f}), and has risen to {loss[-1]:.4f} since.",
            (step, int(run.evaluations.step[-1])),
        )
    else:
        yield RunFinding(0, f"The best held-out loss is {loss[best]:.4f}, at step {step:,}.")
