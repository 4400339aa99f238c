"""Events of a run in words: one line for each."""

from collections.abc import Mapping
from typing import Any

_KNOWN = {"time", "event", "step", "rank", "host", "cost_s", "launch", "words"}
GRAVE = {"failure", "desync", "flipped_bit"}
"""Events that end a run, or a launch of it."""
ODD = {"skip", "spike", "straggler", "sink", "rewind", "shrink"}
"""Events to look at."""


def event_in_words(event: Mapping[str, Any]) -> str:
    """An event without its time and step. Unknown events and missing fields are taken as they are."""
    kind = str(event.get("event", "?"))
    try:
        said = _SAID[kind](event) if kind in _SAID else _anything(kind, event)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        said = _anything(kind, event)
    return " ".join(said.split())  # reports of failures have several lines


def _begin(event: Mapping[str, Any]) -> str:
    hosts = len(set(event["hosts"]))
    layout = ", ".join(f"{name} {size}" for name, size in event.get("layout", {}).items() if size > 1)
    where = f"{counted(event['ranks'], 'rank')} on {counted(hosts, 'host')}, {event['device']}"
    begins = "begins" if event["source"] == "its beginning" else f"goes on from {event['source']}"
    return f"{begins}: {where}" + f" ({layout})" * bool(layout)


def _save(event: Mapping[str, Any]) -> str:
    cost_s = event.get("cost_s")  # in which the training waited
    verb = "is being saved in the background:" if event.get("background") else "saved"
    return f"{verb} {event['path']}" + ("" if cost_s is None else f" ({cost_s:.2f} s)")


def _skip(event: Mapping[str, Any]) -> str:
    scale = event.get("loss_scale")
    figures = [f"loss {_number(event.get('loss'))}", f"gradient norm {_number(event.get('grad_norm'))}"]
    return f"skipped: {', '.join(figures)}" + ("" if scale is None else f" at loss scale {scale:g}")


def _spike(event: Mapping[str, Any]) -> str:
    what = "; ".join(f"{name} {its['value']:.4g}, median {its['median']:.4g}" for name, its in event["what"].items())
    return f"spike: {what}" + "; the step is left out" * bool(event.get("skipped"))


def _straggler(event: Mapping[str, Any]) -> str:
    why = event.get("words") or event.get("cause")
    said = f"{place(event)} takes {event['factor']:.2f} times as long as the other ranks"
    return f"{said}: {why}" if why else said


def _rewind(event: Mapping[str, Any]) -> str:
    return f"back to the state after step {event['to_step']}, {event['cost_s']:.1f} s lost: {event['why']}"


_SAID = {
    "begin": _begin,
    "save": _save,
    "skip": _skip,
    "spike": _spike,
    "straggler": _straggler,
    "rewind": _rewind,
    "sink": lambda event: f"log.sinks: {event['sink']} has failed, and the run goes on without it: {event['problem']}",
    "trace": lambda event: f"traced steps {event['first']} to {event['last']}: {event['path']}",
    "end": lambda event: str(event["reason"]),
    "failure": lambda event: f"failure: {event['problem'] or event.get('report') or place(event)}",
    "restore": lambda event: f"goes on from {event['source']} {event['cost_s']:.1f} s after the loss of ranks",
}


def place(event: Mapping[str, Any]) -> str:
    """The rank and the host of an event; empty without both."""
    rank, host = event.get("rank"), event.get("host")
    return " on ".join([f"rank {rank}"] * (rank is not None) + [str(host)] * (host is not None))


def _anything(kind: str, event: Mapping[str, Any]) -> str:
    """An event by its fields."""
    fields = [
        f"{name} {value}"
        for name, value in event.items()
        if name not in _KNOWN and isinstance(value, str | int | float) and not isinstance(value, bool)
    ]
    cost_s = event.get("cost_s")
    cost = [f"{cost_s:.1f} s lost"] if isinstance(cost_s, int | float) else []
    told = [each for each in (place(event), *fields, *cost) if each]
    return f"{kind}: {', '.join(told)}" if told else kind


def damaged(file: str, number: int) -> str:
    """The note about lines that were left out."""
    return f"{file} has {counted(number, 'damaged line')}, which {'is' if number == 1 else 'are'} left out"


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
