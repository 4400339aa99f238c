"""The page of a report: one HTML file, which needs no other file and no network.

The folder page/ has its parts: the template, the styles, the scripts, and uPlot (github.com/leeoniya/uPlot, MIT).
The scripts and the data are packed, and the browser unpacks them: so a page of a short run stays below 0.1 MB.
"""

import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np

from mpitrain.job.record.conditions import settings_of
from mpitrain.job.record.parsing.numbers import in_words
from mpitrain.job.record.parsing.words import counted
from mpitrain.view.reading.run import Event, RunRecord
from mpitrain.view.report.charts import Chart, Panel
from mpitrain.view.report.encoding import Arrays, chart_data, pack, panel_data
from mpitrain.view.report.findings import findings
from mpitrain.view.report.marks import describe, marks_of
from mpitrain.view.report.summary import at_a_glance, heading
from mpitrain.view.report.time_axis import TimeAxis

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("base.js", "marks.js", "chart.js", "panel.js", "page.js")
MOST_EVENTS = 300
"""Of the table of events."""
BADGES = ("note", "look", "important")


def make_document(
    runs: Sequence[RunRecord], axes: Sequence[TimeAxis], charts: Sequence[Chart], panels: Sequence[Panel], folder: Path
) -> str:
    """The HTML of a report, for a file in `folder`."""
    arrays = Arrays()
    data = {
        "runs": [
            {"name": run.name, "marks": [[mark.group, mark.step, round(mark.seconds, 2), mark.text] for mark in marks_of(run, axis)]}
            for run, axis in zip(runs, axes, strict=True)
        ],
        "charts": [chart_data(chart, arrays) for chart in charts],
        "panels": [panel_data(panel, arrays) for panel in panels],
        "arrays": arrays.texts,
    }  # fmt: skip
    names = ", ".join(run.name for run in runs)
    script = "\n".join(_read(name) for name in SCRIPTS)
    return _fill(
        _read("page.html"),
        {
            "title": escape(f"{names}: training report"),
            "style": _read("uPlot.min.css") + _read("page.css"),
            "top": _top(runs, axes, folder),
            "bottom": _settings(runs) + _events(runs, axes),
            "footer": "Made by <code>python -m mpitrain report</code>. Charts: uPlot, MIT license, notice in the source of this page.",
            "uplot_notice": _read("uPlot.LICENSE"),
            "data": pack({"script": f'{_read("uPlot.iife.min.js")}\n(()=>{{"use strict";\n{script}\n}})();'} | data),
        },
    )  # fmt: skip


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _fill(template: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _top(runs: Sequence[RunRecord], axes: Sequence[TimeAxis], folder: Path) -> str:
    """The names, the figures at one glance, and what stands out."""
    glances = [at_a_glance(run, axis) for run, axis in zip(runs, axes, strict=True)]
    if len(runs) == 1:
        tiles = "".join(
            f'<div class="tile"><span>{escape(name)}</span><b>{escape(text)}</b></div>'
            for name, text in glances[0].items()
            if text
        )
        return (
            f"<header><h1>{escape(runs[0].name)}</h1><p class=dim>{escape(heading(runs[0]))}</p></header>"
            f'<div class="tiles">{tiles}</div><div class="card"><h3>What stands out</h3>{_findings(0, runs[0], folder)}</div>'
        )
    names = dict.fromkeys(name for glance in glances for name in glance)
    rows = [[name, *(glance.get(name, "") for glance in glances)] for name in names]
    rows = [row for row in rows if any(row[1:])]
    abouts = "".join(
        f'<li>{_swatch(number)}<b>{escape(run.name)}</b> <span class="dim">{escape(heading(run))}</span></li>'
        for number, run in enumerate(runs)
    )
    details = "".join(
        f"<details{' open' * (len(runs) <= 3)}><summary>{escape(run.name)}</summary>{_findings(number, run, folder)}</details>"
        for number, run in enumerate(runs)
    )
    return (
        f'<header><h1>{len(runs)} runs</h1></header><ul style="list-style:none;padding:0">{abouts}</ul>'
        f'<div class="card"><h3>Results</h3><div class="scroll">{_table(["", *_names(runs)], rows, numbers=True)}</div></div>'
        f'<h2>What stands out</h2><div class="card">{details}</div>'
    )


def _names(runs: Sequence[RunRecord]) -> list[str]:
    return [f"{_swatch(number)}{escape(run.name)}" for number, run in enumerate(runs)]


def _swatch(number: int) -> str:
    return f'<span class="swatch" style="background:var(--c{number % 8})"></span>'


def _findings(number: int, run: RunRecord, folder: Path) -> str:
    lines = []
    for finding in findings(run):
        button = ""
        if finding.steps is not None and len(run.steps):
            first, last = finding.steps
            label = f"Show steps {first} to {last}"
            button = (
                f'<button data-run="{number}" data-from="{first}" data-to="{last}" aria-label="{label}">show</button>'
            )
        lines.append(
            f'<li class="w{finding.weight}"><span class="badge">{BADGES[finding.weight]}</span>'
            f"<div>{_with_code(finding.text)}</div>{button}</li>"
        )
    return f'<ul class="findings">{"".join(lines)}</ul>{_timelines(run, folder)}'


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _timelines(run: RunRecord, folder: Path) -> str:
    """Links to the traces of the run, relative to the page where both are on one disk."""
    links = []
    for event in run.events:
        path = event.fields.get("path")
        if event.kind != "trace" or not isinstance(path, str):
            continue
        file = _place(run.folder, path)
        first, last = event.fields.get("first"), event.fields.get("last")
        links.append(
            f'<a href="{escape(quote(os.path.relpath(file, folder)))}" download>steps {escape(str(first))} to {escape(str(last))}</a>'
        )
    if not links:
        return ""
    return f"<p>Timelines of all ranks, for ui.perfetto.dev: {', '.join(links)}</p>"


def _place(folder: Path, path: str) -> Path:
    """The file that an event names: absolute, in the run's folder, or from the folder in which the run was started."""
    inside = folder / path
    return inside if os.path.exists(inside) or not os.path.exists(path) else Path(path)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False, marked: Sequence[bool] = ()
) -> str:
    """A table; `head` is HTML, `rows` are texts. `marked`: rows that stand out."""
    kind = ' class="n"' if numbers else ""
    top = "".join(f"<th{kind if at else ''}>{name}</th>" for at, name in enumerate(head))
    lines = []
    for at, row in enumerate(rows):
        cells = "".join(f"<td{kind if place else ''}>{escape(text)}</td>" for place, text in enumerate(row))
        lines.append(f"<tr{' class=differs' * (bool(marked) and marked[at])}>{cells}</tr>")
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _settings(runs: Sequence[RunRecord]) -> str:
    rows = settings_of([run.settings for run in runs])
    if not rows:
        return ""
    if len(runs) == 1:
        pairs = "".join(
            f'<div><span class="dim">{escape(name)}</span><b>{escape(values[0])}</b></div>' for name, values, _ in rows
        )
        return f'<h2>Settings</h2><div class="card settings">{pairs}</div>'
    different = [[name, *values] for name, values, differs in rows if differs]
    same = [[name, values[0]] for name, values, differs in rows if not differs]
    table = _table(["setting", *_names(runs)], different) if different else "<p>All settings are the same.</p>"
    return (
        f'<h2>Settings</h2><div class="card"><h3>Differences</h3><div class="scroll">{table}</div></div>'
        f'<details class="card" style="margin-top:12px"><summary>{len(same)} equal settings</summary>'
        f'<div class="scroll">{_table(["setting", "all runs"], same)}</div></details>'
    )


def _events(runs: Sequence[RunRecord], axes: Sequence[TimeAxis]) -> str:
    parts = []
    for run, axis in zip(runs, axes, strict=True):
        if not run.events:
            continue
        # Of many events the checkpoints are the least interesting.
        listed: list[Event] = run.events
        if len(listed) > MOST_EVENTS:
            listed = [event for event in listed if event.kind != "save"][-MOST_EVENTS:]
        rows = []
        for event in listed:
            seconds = axis.of_event(event)
            after = in_words(max(seconds, 0.0)) if np.isfinite(seconds) else ""
            rows.append(
                [
                    f"{event.step:,}" if event.step is not None else "",
                    after,
                    event.kind.replace("_", " "),
                    describe(event),
                ]
            )
        more = f", {len(listed)} of them here" * (len(listed) < len(run.events))
        name = f" of {escape(run.name)}" * (len(runs) > 1)
        parts.append(
            f'<details class="card" style="margin-top:12px"><summary>{counted(len(run.events), "event")}{name}{more}</summary>'
            f'<div class="scroll">{_table(["step", "after", "event", "in words"], rows)}</div></details>'
        )
    return f"<h2>Events</h2>{''.join(parts)}" if parts else ""
