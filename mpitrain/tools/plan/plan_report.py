"""A search as tables for a terminal, and as data for JSON: the fastest plans, what the best one takes, and why the others lose."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from mpitrain.tools.plan.footprint import KINDS
from mpitrain.tools.plan.layout import RankLayout
from mpitrain.tools.plan.learning_rate import RULES, LearningRate
from mpitrain.tools.plan.price import CAUSES
from mpitrain.tools.plan.search import LayoutPlan, SearchResult


class Reason(NamedTuple):
    """Why a kind of layout loses: the best plan of this kind, against the best of all."""

    kind: str
    """The field of the layout."""
    value: str
    plan: LayoutPlan
    why: str


def as_data(
    found: SearchResult, top: int, price: float | None, tokens: float | None, lr: LearningRate | None
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


def _plan(plan: LayoutPlan, price: float | None, tokens: float | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "layout": plan.layout._asdict(),
        "num_micro": plan.layout.num_micro,
        "lacks": plan.lacks,
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
    console: Console, found: SearchResult, top: int, price: float | None, tokens: float | None, lr: LearningRate | None
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
        if lacked := sorted({plan.lacks for plan in _lacking(found, top)}):
            console.print(f"* estimated; {job.software.name} lacks {' and '.join(lacked)}", style="dim")
    best = found.best
    if best is None:
        _show_none(console, found)
        return
    console.print(f"\nThe fastest that {job.software.name} can run: {told(best)}")
    console.print(_details(best))
    _show_totals(console, best, price, tokens)
    if lr is not None:
        warmup = "" if lr.warmup_steps is None else f", warm-up {lr.warmup_steps:,} steps"
        console.print(f"learning rate {lr.lr:.3g}{warmup} ({RULES[lr.rule]})")
    console.print()
    console.print(_others(found))


def _show_none(console: Console, found: SearchResult) -> None:
    if found.fitting:
        console.print(f"\nNo layout that fits can be run: {found.job.software.name} lacks {found.fitting[0].lacks}.")
    else:
        least = min(found.too_large, key=lambda plan: plan.nbytes)
        lacks = f"lacks {_size(least.lacks_bytes)} a rank"
        console.print(f"No layout fits. The one that needs least memory {lacks}: {told(least)}")
        console.print(_memory(least))


def _fastest(found: SearchResult, top: int) -> Table:
    table = Table(box=None, header_style="", pad_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    for heading in ("MFU", "memory", "tp", "pp", "cp", "ep", "dp", "copies", "ZeRO", "micro"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("schedule", "recompute"):
        table.add_column(heading, no_wrap=True)
    for plan in [plan for plan in found.fitting if not plan.lacks][:top] + _lacking(found, top):
        of = plan.layout
        degrees = (of.tensor, of.pipeline, of.context, of.experts, of.data, of.copies, of.zero)
        micro = f"{of.num_micro} x {of.micro}"
        memory = _size(plan.nbytes)
        schedule = _schedule(plan) + " *" * (plan.lacks != "")
        table.add_row(
            _seconds(plan.step_s), f"{plan.mfu:.1%}", memory, *map(str, degrees), micro, schedule, of.recompute
        )
    return table


def _lacking(found: SearchResult, top: int) -> list[LayoutPlan]:
    """The fastest layouts that the program lacks: at most three, and no slower than its own fastest `top`."""
    own = [plan for plan in found.fitting if not plan.lacks][:top]
    slowest = own[-1].step_s if own else math.inf
    return [plan for plan in found.fitting if plan.lacks and plan.step_s <= slowest][: min(top, 3)]


def _details(plan: LayoutPlan) -> Table:
    """Seconds by cause, memory by kind and bytes by link, side by side."""
    table = Table(box=None, show_header=False, padding=(0, 4, 0, 0), pad_edge=False)
    table.add_row(_causes(plan), _memory(plan), _sent(plan))
    return table


def _causes(plan: LayoutPlan) -> Table:
    table = _small("seconds of a step", "")
    for cause in CAUSES:
        if (seconds := plan.price.seconds[cause]) > 0:
            table.add_row(cause, _seconds(seconds), f"{seconds / plan.step_s:.1%}")
    table.add_row("all", _seconds(plan.step_s), "")
    return table


def _memory(plan: LayoutPlan) -> Table:
    table = _small("memory of a rank")
    for kind in KINDS:
        if plan.footprint[kind] > 0:
            table.add_row(kind, _size(plan.footprint[kind]))
    table.add_row("all", _size(plan.nbytes))
    return table


def _sent(plan: LayoutPlan) -> Table:
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


def _show_totals(console: Console, plan: LayoutPlan, price: float | None, tokens: float | None) -> None:
    console.print(f"{plan.tokens_per_s:,.0f} tokens/s, MFU {plan.mfu:.1%}")
    if price is not None:
        console.print(f"{plan.cost(1e9, price):,.2f} for a billion tokens, at {price:g} an hour for a rank")
    if tokens is not None:
        cost = "" if price is None else f", {plan.cost(tokens, price):,.0f}"
        console.print(f"{plan.days(tokens):.3g} days for {tokens / 1e9:,.6g} billion tokens{cost}")


def _others(found: SearchResult) -> Table:
    table = Table(box=None, header_style="", pad_edge=False)
    for heading in ("why others lose", "", ""):
        table.add_column(heading)
    last = ""
    for reason in reasons(found):
        table.add_row("" if reason.kind == last else reason.kind, reason.value, reason.why)
        last = reason.kind
    return table


def told(plan: LayoutPlan) -> str:
    """A layout in words."""
    of = plan.layout
    parts = [str(of), f"ZeRO {of.zero}" if of.zero else "", _schedule(plan), f"{of.num_micro} x {of.micro} sequences"]
    parts += [
        f"{of.copies} copies" if of.copies > 1 else "",
        "" if of.recompute == "none" else f"recompute {of.recompute}",
    ]
    parts += ["resident" if of.resident else ""]
    return ", ".join(part for part in parts if part)


def _schedule(plan: LayoutPlan) -> str:
    of = plan.layout
    if of.pipeline == 1:
        return ""
    return f"{of.schedule} x{of.stages_per_rank}" if of.schedule == "interleaved" else of.schedule


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _size(nbytes: float) -> str:
    if not nbytes:
        return ""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes:.0f} B"


def reasons(found: SearchResult) -> list[Reason]:
    """For each value of each field of a layout that the best plan does not have: what the best plan with this value lacks."""
    best = found.best
    if best is None:
        return []
    made = []
    for label, key in _KINDS.items():
        chosen = key(best.layout)
        quickest: dict[Any, LayoutPlan] = {}
        for plan in sorted(found.fitting, key=lambda plan: plan.lacks != ""):  # a stable sort
            quickest.setdefault(key(plan.layout), plan)
        smallest: dict[Any, LayoutPlan] = {}
        for plan in found.too_large:
            value = key(plan.layout)
            if value not in quickest and (value not in smallest or plan.nbytes < smallest[value].nbytes):
                smallest[value] = plan
        for value in sorted(quickest.keys() | smallest.keys(), key=lambda value: (str(type(value)), value)):
            if value == chosen:
                continue
            if value in quickest:
                made.append(Reason(label, str(value), quickest[value], _slower(quickest[value], best)))
            else:
                plan = smallest[value]
                made.append(Reason(label, str(value), plan, f"does not fit: lacks {_size(plan.lacks_bytes)} a rank"))
    return made


def _slower(plan: LayoutPlan, best: LayoutPlan) -> str:
    """How much slower a plan is, and the causes that add most."""
    ratio = plan.step_s / best.step_s - 1
    lacks = f"; needs {plan.lacks}, which {plan.job.software.name} lacks" if plan.lacks else ""
    if abs(ratio) < 5e-4:
        return "as fast" + lacks
    if ratio < 0:
        return f"{-ratio:.1%} faster" + lacks
    more = {cause: plan.price.seconds[cause] - best.price.seconds[cause] for cause in CAUSES}
    causes = sorted(
        (cause for cause in more if more[cause] > 0.2 * (plan.step_s - best.step_s)), key=lambda cause: -more[cause]
    )
    said = ", ".join(f"{cause} +{_seconds(more[cause])}" for cause in causes[:2])
    return f"{ratio:.1%} slower" + (f": {said}" if said else "") + lacks


_KINDS: dict[str, Callable[[RankLayout], Any]] = {
    "tensor": lambda layout: layout.tensor,
    "pipeline": lambda layout: layout.pipeline,
    "context": lambda layout: layout.context,
    "experts": lambda layout: layout.experts,
    "ZeRO": lambda layout: layout.zero,
    "copies": lambda layout: layout.copies,
    "schedule": lambda layout: layout.schedule if layout.pipeline > 1 else "no pipeline",
    "micro-batch": lambda layout: layout.micro,
    "recompute": lambda layout: layout.recompute,
    "storage": lambda layout: "resident" if layout.resident else "private",
}
"""The fields of a layout that `reasons` compares, by their name in a report."""
