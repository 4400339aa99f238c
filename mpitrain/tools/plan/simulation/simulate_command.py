"""The flags of `plan --simulate`, and the table that it prints."""

import argparse
from collections.abc import Sequence
from math import inf, isfinite

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mpitrain.stages.schedules import Schedule, Times
from mpitrain.tools.plan.simulation.job import Job
from mpitrain.tools.plan.simulation.outcome import CAUSES, Outcome


def options(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Their defaults are those of `Job`, except that a run has failures and checkpoints only if they are given."""
    add = parser.add_argument_group("simulation", "of a run event by event").add_argument
    add("--simulate", action="store_true", help="simulate a run by the best plan")
    add(
        "--jitter",
        type=float,
        default=0.0,
        help="by how much an action of a rank takes longer, on average; exponential (0)",
    )
    add("--slow-ranks", type=int, default=0, help="ranks that are slow throughout the run (0)")
    add("--slow-factor", type=float, default=Job.slow_factor, help="how many times as long these take (%(default)s)")
    add("--mtbf-hours", type=float, default=inf, help="mean time between failures of the job (no failures)")
    add("--rank-mtbf-hours", type=float, default=inf, help="the same of one rank, instead")
    add("--checkpoint-steps", type=int, default=Job.checkpoint_steps, help="steps between checkpoints (%(default)s)")
    add("--checkpoint-seconds", type=float, default=0.0, help="how long a checkpoint stops the training (0)")
    add(
        "--restart-seconds",
        type=float,
        default=0.0,
        help="to detect a failure, start again and load the checkpoint (0)",
    )
    add("--hours", type=float, default=Job.hours, help="of the run (%(default)s)")
    add("--steps", type=int, help="the run ends after so many steps, if it does not end before")
    add("--seed", type=int, default=0, help="of the random numbers (%(default)s)")


def job_of(
    chosen: argparse.Namespace,
    schedule: Schedule,
    times: Sequence[Times],
    *,
    copies: int,
    tensor_ranks: int,
    reduction_s: float,
    optimizer_s: float,
    tokens: int,
) -> Job:
    """The job of these flags and of a layout, whose arguments are those of `Job`. ValueError."""
    num_ranks = schedule.num_ranks * copies * tensor_ranks
    return Job(
        schedule,
        tuple(times),
        copies=copies,
        tensor_ranks=tensor_ranks,
        reduction_s=reduction_s,
        optimizer_s=optimizer_s,
        tokens=tokens,
        jitter=chosen.jitter,
        slow_ranks=chosen.slow_ranks,
        slow_factor=chosen.slow_factor,
        mtbf_hours=min(chosen.mtbf_hours, chosen.rank_mtbf_hours / num_ranks),
        checkpoint_steps=chosen.checkpoint_steps,
        checkpoint_s=chosen.checkpoint_seconds,
        restart_s=chosen.restart_seconds,
        hours=chosen.hours,
        steps=chosen.steps,
    )


def show(outcome: Outcome, console: Console | None = None) -> None:
    """Print where the time goes, the times of a step, and the best interval between checkpoints."""
    (console or Console()).print(_shown(outcome))


def _shown(outcome: Outcome) -> RenderableType:
    job, run = outcome.job, outcome.run
    causes = Table(
        "", "", "", title=f"{job.schedule.name}, {job.num_ranks:,} ranks, {_lasts(run.total_s)}", show_header=False
    )
    causes.columns[1].justify = "right"
    causes.columns[2].style = "dim"
    for name, share in outcome.shares.items():
        if share > 0:
            causes.add_row(name, f"{share:.2%}", CAUSES[name])
    low, high = outcome.to_dict()["step_s"]["quantile_0.01"], outcome.to_dict()["step_s"]["quantile_0.99"]
    lines = [
        f"goodput {outcome.goodput:.2%} of the time in steps that count; {outcome.expected_goodput:.2%} by Daly's formula; "
        f"{outcome.tokens_per_s:,.0f} tokens/s",
        f"{run.failures:,} failures; {run.steps:,} steps, {run.lost_steps:,} more were lost",
        f"step {outcome.mean_step_s:.3f} s, 98 % within {low:.3f} and {high:.3f} s; without disturbances {outcome.ideal_s:.3f} s, "
        f"with jitter alone {outcome.with_jitter_s:.3f} s, with the slow ranks alone {outcome.with_slow_s:.3f} s",
    ]
    best = outcome.interval
    if isfinite(best.young_s):
        lines.append(
            f"best interval between checkpoints: {_lasts(best.young_s)} (Young), {_lasts(best.daly_s)} (Daly), "
            f"{_lasts(best.simulated_s)} = {round(best.simulated_s / outcome.mean_step_s):,} steps (simulated, goodput "
            f"{best.simulated_goodput:.2%}); this run has {_lasts(job.checkpoint_steps * outcome.mean_step_s)}"
        )
    return Group(causes, *map(Text, lines))


def _lasts(seconds: float) -> str:
    return (
        f"{seconds / 3600:,.1f} h"
        if seconds >= 7200
        else f"{seconds / 60:,.1f} min"
        if seconds >= 120
        else f"{seconds:.1f} s"
    )
