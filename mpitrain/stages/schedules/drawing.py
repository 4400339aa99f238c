"""Draws a timeline: a row for each rank, a box for each action, with its micro-batch. As SVG, and as text."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from rich.text import Text

from mpitrain.stages.schedules.schedule import NAMES, Action, Kind
from mpitrain.stages.schedules.timeline import Timeline

_COLOURS: dict[Kind, tuple[str, str]] = {
    "F": ("#7aa6da", "blue"),
    "B": ("#8fbf7f", "green"),
    "I": ("#6fc2c0", "cyan"),
    "W": ("#d6a5d6", "magenta"),
}
"""Of each kind of action: in SVG, and in a terminal."""

_LEFT, _ROW, _GAP = 64, 22, 4  # pixels


class _Box(NamedTuple):
    rank: int
    action: Action
    begun: float
    ended: float


def svg(timelines: Sequence[tuple[str, Timeline]], *, stages_per_rank: int, width: int = 1200) -> str:
    """A picture of timelines one below the other, on one scale of time, each with its title. `width`: pixels.

    Boxes of a rank's later stages are darker. Text is left out of boxes that are too narrow for it.
    """
    total = max(timeline.total for _, timeline in timelines) or 1.0
    scale = (width - _LEFT - 8) / total
    parts, y = [], 8
    for title, timeline in timelines:
        y += 16
        parts.append(f'<text x="{_LEFT}" y="{y - 4}" font-weight="bold">{escape(title)}</text>')
        num_ranks = len(timeline.programs)
        for rank in range(num_ranks):
            parts.append(f'<text x="8" y="{y + rank * _ROW + 14}">rank {rank}</text>')
        for box in _boxes(timeline):
            x, w = _LEFT + box.begun * scale, (box.ended - box.begun) * scale
            top = y + box.rank * _ROW
            turn = box.action.stage // num_ranks
            shade = 1 - 0.35 * turn / max(stages_per_rank - 1, 1)
            parts.append(
                f'<rect x="{x:.2f}" y="{top}" width="{max(w - 0.5, 0.3):.2f}" height="{_ROW - _GAP}" '
                f'fill="{_COLOURS[box.action.kind][0]}" fill-opacity="{shade:.2f}"><title>{_told(box)}</title></rect>'
            )
            if w > 7 * len(str(box.action.micro)):
                parts.append(f'<text x="{x + w / 2:.2f}" y="{top + 13}" text-anchor="middle">{box.action.micro}</text>')
        y += num_ranks * _ROW + 8
    for at, (kind, name) in enumerate(NAMES.items()):
        parts.append(f'<rect x="{_LEFT + at * 190}" y="{y}" width="12" height="12" fill="{_COLOURS[kind][0]}"/>')
        parts.append(f'<text x="{_LEFT + at * 190 + 18}" y="{y + 10}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 24}" font-family="sans-serif" font-size="11">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(timeline: Timeline, unit: float) -> list[Text]:
    """A line for each rank, in which a column is `unit` seconds. An action has its letter and micro-batch, and idle time is dots."""
    micro = max(action.micro for program in timeline.programs for action in program)
    width = len(str(micro)) + 2
    lines = []
    for rank in range(len(timeline.programs)):
        line, at = Text(f"rank {rank:<{len(str(len(timeline.programs)))}} "), 0
        for box in _boxes(timeline):
            if box.rank != rank:
                continue
            begin, end = round(box.begun / unit), round(box.ended / unit)
            line.append("·".ljust(width) * (begin - at), style="dim")
            label = f"{box.action.kind}{box.action.micro}"
            line.append(label.ljust(width * (end - begin))[: width * (end - begin)], style=_COLOURS[box.action.kind][1])
            at = end
        lines.append(line)
    return lines


def _boxes(timeline: Timeline) -> Iterator[_Box]:
    for rank, program in enumerate(timeline.programs):
        for action, begun, ended in zip(program, timeline.begun[rank], timeline.ended[rank], strict=True):
            yield _Box(rank, action, begun, ended)


def _told(box: _Box) -> str:
    return f"{box.action.words}: {box.begun:g} to {box.ended:g} s"
