"""One view of a run in lines of text, for a screen of any size or for a file."""

import datetime
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from collectives.texts import shown
from mpitrain.job.record.files.metrics import PARTS
from mpitrain.job.record.parsing.lines import Line
from mpitrain.job.record.parsing.numbers import duration
from mpitrain.job.record.parsing.words import GRAVE, ODD, counted, event_in_words
from mpitrain.view.watch import ranks
from mpitrain.view.watch.charts import TWO_CHARTS, Range, Screen, charts
from mpitrain.view.watch.watched import RUNNING, Watched

KEYS = "q quit   + - zoom   left right move"
_SPLIT_STEPS = 50
_STYLES = dict(
    zip((*PARTS.values(), "rest"), ("yellow", "blue", "cyan", "magenta", "red", "bright_black", "white"), strict=True)
)
"""Of the parts of a step. "communication" has the waits for other ranks, "rest" is what is not measured."""


def view(run: Watched, screen: Screen, steps: Range) -> list[Text]:
    """The lines, which fit the screen."""
    width, height = screen.width, screen.height
    figures = _flow(_figures(run), width)[: None if height is None else max(height // 8, 1)]
    head = [*_heading(run, screen), *figures, *_remarks(run, width)]
    foot = [Text(KEYS, style="dim")] if screen.has_keys and (height or 0) >= 16 else []
    if height is None:
        curves = charts(run, screen, steps, 24 if width < TWO_CHARTS else 12)
        body = [*curves, *_split(run, screen), *_ranks(run, width, 32), *_events(run, 11)]
    else:
        body = _body(run, screen, steps, height - len(head) - len(foot))
    lines = [*head, *body]
    if height is not None:
        lines = lines[: height - len(foot)]
        lines += [Text()] * (height - len(foot) - len(lines))
    lines += foot
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="crop" if screen.ascii_only else "ellipsis")
        if screen.ascii_only:  # hosts and folders may have other characters
            line.plain = line.plain.encode("ascii", "replace").decode()
    return lines


def _body(run: Watched, screen: Screen, steps: Range, room: int) -> list[Text]:
    """What is below the heading, in at most `room` lines. On a small screen the curves stay longest."""
    split = _split(run, screen) if room >= 12 else []
    room -= len(split)
    below = max(room - max(7, round(0.45 * room)), 0)
    table = _ranks(run, screen.width, below * 3 // 5 - 1) if below >= 3 else []
    events = _events(run, below - len(table)) if below - len(table) >= 2 else []
    curves = charts(run, screen, steps, room - len(table) - len(events))
    return [*curves, *split, *table, *events]


def _heading(run: Watched, screen: Screen) -> list[Text]:
    status, last = run.status(), run.last
    names = shown(str(run.folder)), shown(run.folder.resolve().name)
    name = next((each for each in names if len(each) + 2 + len(status.words) <= screen.width), None)
    name = name or next((each for each in names if len(each) <= screen.width // 2), None)
    if name is not None:  # the state begins in the same line
        indent = " " * (len(name) + 2)
        first, *rest = textwrap.wrap(
            status.words, screen.width, initial_indent=indent, max_lines=4, placeholder=" ..."
        ) or [indent]
        lines = [Text.assemble((name, "bold"), "  ", (first[len(indent) :], status.style))]
    else:
        lines = [Text(names[1], "bold")]
        rest = textwrap.wrap(status.words, screen.width, max_lines=3, placeholder=" ...")
    lines += [Text(line, status.style) for line in rest]
    if last is None:
        return lines
    done, steps = last["step"], run.steps
    if steps is None or steps < max(done, 1):
        return [*lines, Text(f"step {done:,}")]
    left_s = run.pace.left_s(steps) if status.words == RUNNING and done < steps else None
    words = [f"{done / steps:.0%}", *([] if left_s is None else [f"{duration(left_s)} left"])]
    begin, end = f"step {done:,}/{steps:,}", "  ".join(words)
    room = screen.width - len(begin) - len(end) - 4
    if room < 4:
        return [*lines, Text(f"{begin}  {end}")]
    full = round(room * done / steps)
    filled, empty = ("#", ".") if screen.ascii_only else ("━", "─")
    return [*lines, Text.assemble(begin, "  ", (filled * full, "green"), (empty * (room - full), "dim"), "  ", end)]


def _figures(run: Watched) -> Iterator[str]:
    """The figures of the last step, of evaluations, checkpoints and the begin, each in words."""
    if run.last is not None and run.last.get("loss", 0.0) is None:
        yield "loss not finite"
    yield from _words(run.last, _FIGURES)
    if run.last_heldout is not None and run.best_heldout is not None:
        (best, best_at), at = run.best_heldout, run.last_heldout["step"]
        is_best = best_at == at
        yield f"held-out {_number(run.last_heldout['heldout_loss'])} at step {at:,} " + (
            "(best)" if is_best else f"(best {best:.4f} at {best_at:,})"
        )
    if run.checkpoint is not None:
        step, saved_at = run.checkpoint
        yield f"checkpoint at step {step:,}, {duration(max(time.time() - saved_at, 0))} ago"
    yield from _words(run.last, _FURTHER)
    if run.hosts:
        device = run.begin.get("device") or ""
        yield f"{counted(len(run.hosts), 'rank')} on {counted(len(set(run.hosts)), 'host')}" + f", {device}" * bool(
            device
        )


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not finite"


def _words(line: Line | None, forms: Mapping[str, Callable[[float], str]]) -> Iterator[str]:
    for name, form in forms.items():
        if isinstance(value := (line or {}).get(name), int | float):
            yield form(value)


_FIGURES: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "step_s": lambda value: f"{value * 1e3:,.0f} ms",
    "mfu": lambda value: f"MFU {value:.0%}",
    "mfu_vendor": lambda value: f"({value:.0%} of the data sheet)",
    "memory_bytes": lambda value: f"{value / 1e6:,.0f} MB a rank",
}
_FURTHER: dict[str, Callable[[float], str]] = {
    "lr": lambda value: f"lr {value:.3g}",
    "grad_norm": lambda value: f"gradient {value:.3g}",
}


def _remarks(run: Watched, width: int) -> list[Text]:
    """The ranks that train has named as slow since the last begin, and files that cannot be read."""
    said = {event.get("rank"): event for event in run.session if event.get("event") == "straggler"}
    texts = [
        (f"slow at step {event.get('step', '?')}: {event_in_words(event)}", "yellow")
        for event in list(said.values())[-3:]
    ]
    texts += [(note, "red") for note in run.notes]
    return [
        Text(line, style)
        for text, style in texts
        for line in textwrap.wrap(text[: 4 * width], width, max_lines=2, placeholder=" ...")
    ]


# The split of a step


def split(lines: Sequence[Line]) -> dict[str, float]:
    """The mean seconds of each part of a step, in the order of _STYLES. Parts that were not measured are in "rest"."""
    lines = [line for line in lines if line.get("step_s") is not None]
    if not lines:
        return {}
    parts = {part: sum(line.get(name) or 0.0 for line in lines) / len(lines) for name, part in PARTS.items()}
    parts["rest"] = max(sum(line["step_s"] for line in lines) / len(lines) - sum(parts.values()), 0.0)
    return parts


def _split(run: Watched, screen: Screen) -> list[Text]:
    """The split of a step as a bar, with its legend."""
    parts = {name: seconds for name, seconds in split(list(run.recent)[-_SPLIT_STEPS:]).items() if seconds > 0}
    total = sum(parts.values())
    if not total:
        return []
    lines, begun = [Text()], 0.0
    for name, seconds in parts.items():
        cells = round(screen.width * (begun + seconds) / total) - round(screen.width * begun / total)
        lines[0].append("█" * cells, style=_STYLES[name])
        begun += seconds
    words = [Text(f"{total * 1e3:,.0f} ms a step", style="bold")]
    for name, seconds in parts.items():
        if seconds / total >= 0.005:
            words.append(Text(f"{name} {seconds / total:.0%}", style=_STYLES[name]))
    legend = _flow(words, screen.width)
    return [*lines, *legend] if screen.has_colour and not screen.ascii_only else legend


# Ranks and events


def _ranks(run: Watched, width: int, most: int) -> list[Text]:
    slow: Mapping[int, str] = {
        event["rank"]: str(event.get("cause") or "")
        for event in run.session
        if event.get("event") == "straggler" and event.get("rank") is not None
    }
    lines = ranks.summary_lines(run.ranks) if most >= 8 or not run.ranks.all() else []
    if most - len(lines) < 1 or not run.ranks.all():
        return lines[: most + 1]
    return [*lines, *ranks.table(run.ranks, run.hosts, slow, width=width, most=most - len(lines))]


def _events(run: Watched, most: int) -> list[Text]:
    """The last events, the newest at last, below a title."""
    if not run.events or most < 2:
        return []
    return [Text("last events", style="bold"), *(_event(event) for event in run.events[-(most - 1) :])]


def _event(event: Mapping[str, Any]) -> Text:
    kind, step = event.get("event"), event.get("step")
    # The folder of the run is known.
    short = {name: path.rpartition("/")[2] for name in ("path", "source") if isinstance(path := event.get(name), str)}
    style = "red" if kind in GRAVE else "yellow" if kind in ODD else ""
    at = f"step {step:,}  " if isinstance(step, int) else ""
    return Text.assemble(
        (f"{_clock(event.get('time'))}  ", "dim"), (f"{at}{event_in_words({**event, **short})}", style)
    )


def _clock(stamp: Any) -> str:
    """The time of an event on this host's clock, with the day if it is not today."""
    try:
        at = datetime.datetime.fromisoformat(stamp).astimezone()
    except (TypeError, ValueError, OverflowError):
        return "--:--:--"
    is_today = at.date() == datetime.datetime.now().astimezone().date()
    return f"{at:%H:%M:%S}" if is_today else f"{at:%m-%d %H:%M}"


def _flow(words: Iterator[str] | Sequence[Text], width: int) -> list[Text]:
    """Words in as few lines as they fit in."""
    lines: list[Text] = []
    for word in words:
        text = Text(word) if isinstance(word, str) else word
        if lines and lines[-1].cell_len + 2 + text.cell_len <= width:
            lines[-1].append("  ").append_text(text)
        else:
            lines.append(Text().append_text(text))
    return lines
