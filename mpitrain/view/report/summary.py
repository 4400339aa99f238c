"""The figures of a run at one glance. Pure."""

from typing import Any

import numpy as np

from mpitrain.job.record.parsing.numbers import bytes_in_words, in_words
from mpitrain.view.reading.run import RunRecord
from mpitrain.view.report.time_axis import TimeAxis

LAST = 20
"""The loss is the mean of so many last steps, of those that are finite."""


def heading(run: RunRecord) -> str:
    """What the run is, in a line."""
    settings, begin = run.settings, run.last("begin")
    fields: dict[str, Any] = dict(begin.fields) if begin is not None else {}
    total, done = settings.get("train.steps"), int(run.steps.step[-1]) if len(run.steps) else 0
    words = [f"{done:,}" + (f" of {total:,}" if isinstance(total, int) else "") + " steps"]
    if state := run.state:
        words[0] += f", {state}"
    model = " ".join(str(settings[name]) for name in ("model.family", "model.size") if name in settings)
    if model:
        words.append(model)
    if isinstance(number := fields.get("parameters"), int | float):
        words.append(f"{number / 1e6:,.0f} M parameters" if number >= 1e7 else f"{number / 1e6:.2f} M parameters")
    if run.num_ranks is not None:
        hosts = fields.get("hosts")
        nodes = f" on {len(set(hosts))} node{'s' * (len(set(hosts)) > 1)}" if isinstance(hosts, list) and hosts else ""
        words.append(f"{run.num_ranks:,} rank{'s' * (run.num_ranks > 1)}{nodes}")
    if isinstance(device := fields.get("device"), str):
        words.append("CPU" if device == "cpu" else device)
    if isinstance(layout := fields.get("layout"), dict):
        words.append(" × ".join(f"{name} {size}" for name, size in layout.items() if size != 1))
    return " · ".join(word for word in words if word)


def at_a_glance(run: RunRecord, axis: TimeAxis) -> dict[str, str]:
    """The most important figures with units; empty texts for those that are unknown."""
    step_s = run.steps.column("step_s")
    total = float(np.nansum(step_s))
    held_out = run.evaluations.column("heldout_loss")
    held_out = held_out[np.isfinite(held_out)]
    loss = run.steps.columns.get("loss", np.zeros(0))[-LAST:]
    memory = run.ranks.columns.get("memory_bytes", run.steps.column("memory_bytes"))
    mfu = run.steps.column("mfu")
    return {
        f"loss, last {LAST} steps": _mean_loss(loss),
        "held-out loss, last": f"{held_out[-1]:.4f}" if len(held_out) else "",
        "tokens/s, median": _median(run.steps.column("tokens_per_s"), "{:,.0f}"),
        "step, median": in_words(float(np.nanmedian(step_s))) if np.isfinite(step_s).any() else "",
        "communication, rank 0": f"{np.nansum(run.steps.column('comm_s')) / total:.1%}" if total > 0 else "",
        "MFU, measured peak": _median(mfu, "{:.1%}"),
        "memory of a rank, most": bytes_in_words(float(np.nanmax(memory))) if np.isfinite(memory).any() else "",
        "skipped steps": f"{np.nansum(run.steps.column('skipped')):,.0f}" if len(run.steps) else "",
        "time" if axis.is_wall else "time in steps": in_words(float(axis.seconds[-1])) if len(axis.seconds) else "",
    }


def _mean_loss(loss: np.ndarray[Any, Any]) -> str:
    """Steps that are not finite count only if all of them are: an earlier loss would say that the run is well."""
    known = loss[np.isfinite(loss)]
    return f"{known.mean():.4f}" if len(known) else "not finite" if len(loss) else ""


def _median(values: np.ndarray[Any, Any], form: str) -> str:
    return form.format(np.nanmedian(values)) if np.isfinite(values).any() else ""
