"""A search as tables for a terminal, and as data for JSON."""

from typing import Any

from rich.console import Console
from rich.table import Table

from mpitrain.plan.footprint import KINDS
from mpitrain.plan.learning_rate import RULES, LearningRate
from mpitrain.plan.price import CAUSES
from mpitrain.plan.search import Found, Plan, reasons

LACKING = "estimated; the trainer lacks it"


def as_data(
    found: Found, top: int, price: float | None, tokens: float | None, lr: LearningRate | None
) -> dict[str, Any]:
    """The search for JSON: bytes, seconds, shares; the cost in the unit of `price`, which is that of one rank for an hour."""
    job, best = found.job, found.best
    return {
        "model": {"name": job.model.name, "parameters": job.model.parameters, "context": job.model.context},
        "machine": job.machine.name,
        "software": job.software.name,
        "ranks": job.ranks,
        "batch": job.batch,
        "num_layouts": found.num_layouts,
        "num_fitting": len(found.fitting),
        "best": None if best is None else _plan(best, price, tokens),
        "plans": [_plan(plan, price, tokens) for plan in found.fitting[:top]],
        "others": [{"kind": r.kind, "value": r.value, "why": r.why} for r in reasons(found)],
        "learning_rate": None if lr is None else lr._asdict(),
    }


def _plan(plan: Plan, price: float | None, tokens: float | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "layout": plan.layout._asdict(),
        "num_micro": plan.layout.num_micro,
        "trainer_lacks_it": plan.is_lacking,
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "seconds": plan.price.seconds,
        "memory": plan.footprint,
        "memory_bytes": plan.nbytes,
        "sent": {purpose: sent._asdict() for purpose, sent in plan.price.sent.items()},
    }
    if price is not None:
        made["cost_per_billion_tokens"] = plan.cost(1e9, price)
    if tokens is not None:
        made["days"] = plan.days(tokens)
        if price is not None:
            made["cost"] = plan.cost(tokens, price)
    return made


def show(
    console: Console, found: Found, top: int, price: float | None, tokens: float | None, lr: LearningRate | None
) -> None:
    """Print the fastest plans, what the best one takes, and why others lose."""
    job = found.job
    ranks = f"{job.ranks} rank{'s' * (job.ranks > 1)}"
    console.print(
        f"{job.model.name}: {job.model.parameters / 1e9:.3g} B parameters, {ranks} of {job.machine.name}, "
        f"{job.batch} sequences of {job.model.context} tokens a step, {job.software.name}"
    )
    fitting = f"{len(found.fitting):,} fit {job.room / 1e9:.3g} GB a rank"
    console.print(f"{found.num_layouts:,} layouts were considered; {fitting}\n", style="dim")
    if found.fitting:
        console.print(_fastest(found, top))
        if any(plan.is_lacking for plan in found.fitting[:top]):
            console.print(f"* {LACKING}", style="dim")
    best = found.best
    if best is None:
        _show_none(console, found)
        return
    console.print(f"\nThe fastest that the trainer can run: {told(best)}")
    console.print(_details(best))
    _show_totals(console, best, price, tokens)
    if lr is not None:
        warmup = "" if lr.warmup_steps is None else f", warm-up {lr.warmup_steps:,} steps"
        console.print(f"learning rate {lr.lr:.3g}{warmup} ({RULES[lr.rule]})")
    console.print()
    console.print(_others(found))


def _show_none(console: Console, found: Found) -> None:
    if found.fitting:
        console.print(f"\nNo layout that fits can be run by the trainer: {LACKING}.")
    else:
        least = min(found.too_large, key=lambda plan: plan.nbytes)
        lacks = f"lacks {least.lacks_bytes / 1e9:,.3g} GB a rank"
        console.print(f"No layout fits. The one that needs least memory {lacks}: {told(least)}")
        console.print(_memory(least))


def _fastest(found: Found, top: int) -> Table:
    table = Table(box=None, header_style="", pad_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    for heading in ("MFU", "memory", "tp", "pp", "cp", "ep", "dp", "copies", "ZeRO", "micro"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("schedule", "recompute"):
        table.add_column(heading, no_wrap=True)
    for plan in found.fitting[:top]:
        of = plan.layout
        degrees = (of.tensor, of.pipeline, of.context, of.experts, of.data, of.copies, of.zero)
        micro = f"{of.num_micro} x {of.micro}"
        memory = f"{plan.nbytes / 1e9:.1f} GB"
        schedule = _schedule(plan) + " *" * plan.is_lacking
        table.add_row(
            _seconds(plan.step_s), f"{plan.mfu:.1%}", memory, *map(str, degrees), micro, schedule, of.recompute
        )
    return table


def _details(plan: Plan) -> Table:
    """Seconds by cause, memory by kind and bytes by link, side by side."""
    table = Table(box=None, show_header=False, padding=(0, 4, 0, 0), pad_edge=False)
    table.add_row(_causes(plan), _memory(plan), _sent(plan))
    return table


def _causes(plan: Plan) -> Table:
    table = _small("seconds of a step", "")
    for cause in CAUSES:
        if (seconds := plan.price.seconds[cause]) > 0:
            table.add_row(cause, _seconds(seconds), f"{seconds / plan.step_s:.1%}")
    table.add_row("all", _seconds(plan.step_s), "")
    return table


def _memory(plan: Plan) -> Table:
    table = _small("memory of a rank")
    for kind in KINDS:
        if plan.footprint[kind] > 0:
            table.add_row(kind, f"{plan.footprint[kind] / 1e9:.2f} GB")
    table.add_row("all", f"{plan.nbytes / 1e9:.2f} GB")
    return table


def _sent(plan: Plan) -> Table:
    table = _small("a rank sends in a step", "in its node", "to others")
    for purpose, sent in plan.price.sent.items():
        if sent.node_bytes or sent.network_bytes:
            table.add_row(purpose, _size(sent.node_bytes), _size(sent.network_bytes))
    return table


def _small(title: str, *more: str) -> Table:
    table = Table(box=None, header_style="", pad_edge=False)
    table.add_column(title, no_wrap=True)
    for heading in more or ("",):
        table.add_column(heading, justify="right", no_wrap=True)
    if len(more) == 1:
        table.add_column("", justify="right", no_wrap=True)
    return table


def _show_totals(console: Console, plan: Plan, price: float | None, tokens: float | None) -> None:
    console.print(f"{plan.tokens_per_s:,.0f} tokens/s, MFU {plan.mfu:.1%}")
    if price is not None:
        console.print(f"{plan.cost(1e9, price):,.2f} for a billion tokens, at {price:g} an hour for a rank")
    if tokens is not None:
        cost = "" if price is None else f", {plan.cost(tokens, price):,.0f}"
        console.print(f"{plan.days(tokens):.3g} days for {tokens / 1e9:,.6g} billion tokens{cost}")


def _others(found: Found) -> Table:
    table = Table(box=None, header_style="", pad_edge=False)
    for heading in ("why others lose", "", ""):
        table.add_column(heading)
    last = ""
    for reason in reasons(found):
        table.add_row("" if reason.kind == last else reason.kind, reason.value, reason.why)
        last = reason.kind
    return table


def told(plan: Plan) -> str:
    """A layout in words."""
    of = plan.layout
    parts = [str(of), f"ZeRO {of.zero}" if of.zero else "", _schedule(plan), f"{of.num_micro} x {of.micro} sequences"]
    parts += [
        f"{of.copies} copies" if of.copies > 1 else "",
        "" if of.recompute == "none" else f"recompute {of.recompute}",
    ]
    parts += ["resident" if of.resident else ""]
    return ", ".join(part for part in parts if part)


def _schedule(plan: Plan) -> str:
    of = plan.layout
    if of.pipeline == 1:
        return ""
    return f"{of.schedule} x{of.stages_per_rank}" if of.schedule == "interleaved" else of.schedule


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes else ""
