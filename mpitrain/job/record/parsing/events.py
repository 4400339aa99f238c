"""The events of a run with types: what a reader asks for is of the type that a run writes, or is not there."""

import datetime
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from mpitrain.files import MOST_LINE_BYTES, MOST_LINES_BYTES, json_of, reading, too_long
from mpitrain.job.record.files.events import NAME
from mpitrain.job.record.parsing.lines import ERRORS, MOST_FIGURE, MOST_RANKS, MOST_STEP, MOST_TIME_S
from mpitrain.job.record.parsing.readable import Readable
from mpitrain.job.record.parsing.words import damaged

MOST_EVENTS, _MOST_BYTES = 20_000, 16 << 20
"""Of more events, or of longer lines together, the last ones are kept, and the last begin before them."""
_BEGIN = b'"begin"'
_MOST_EARLIER_BYTES = 64 << 20
"""In which that begin is looked for. That of a longer record is looked for in its first _MOST_LINE_BYTES, too."""
_MOST_TRIES = 1000
"""Lines that have the word and are other events."""
_MOST_LINE_BYTES = 4 << 20
"""Of an event; the begin of 100,000 ranks has 3 MB."""
_MOST_FACTS = 200
"""Of the environment; a run tells about twenty."""
_MOST_WORDS = 10_000
"""Characters of a text, such as the report of a failure."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEP)]
_Large = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Number = Annotated[float, msgspec.Meta(ge=-MOST_FIGURE, le=MOST_FIGURE)]


class _Spike(msgspec.Struct):
    """See health/spikes.py."""

    value: _Number
    median: _Number
    score: _Number | None = None
    what: str = ""


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("step", "rank", "threads", "launch", "first", "last", "to_step", "idle", "pid"), _Count),
    **dict.fromkeys(("parameters", "tokens_per_step", "memory_bytes_of_rank"), _Large),
    **dict.fromkeys(("cost_s", "factor", "loss", "grad_norm", "loss_scale", "flops_per_s", "vendor_flops_per_s", "monitor_s"), _Number),
    **dict.fromkeys(("background", "skipped"), bool),
    **dict.fromkeys(
        ("time", "event", "host", "device", "source", "path", "problem", "report", "words", "cause", "sink", "reason", "why"), str
    ),
    "release": str,
    "hosts": Annotated[list[str], msgspec.Meta(max_length=MOST_RANKS)],
    "layout": Annotated[dict[str, _Count], msgspec.Meta(max_length=_MOST_FACTS)],
    "environment": Annotated[dict[str, str], msgspec.Meta(max_length=_MOST_FACTS)],
}  # fmt: skip
"""The fields that a run writes: see record/events.py."""
_OF_KINDS: dict[tuple[str, str], Any] = {("begin", "ranks"): _Count, ("spike", "what"): dict[str, _Spike]}
"""Fields that have these types in one kind of events alone."""


def read_events(folder: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """The events of a run, oldest first; a last line that was cut by a crash is left out. Empty without a file. OSError.

    Of a long record these are the last ones, and before them the last begin of the others: it tells ranks, hosts and environment.

    `notes`: gets a line about damaged lines.
    """
    text = _of_events()
    events: list[dict[str, Any]] = []
    num_damaged = 0
    lines, is_torn, earlier = _last_lines(folder / NAME)
    for number, line in reversed(list(enumerate(lines, 1))):  # where texts are too many, the last ones are readable
        try:
            found = json_of(line) if len(line) <= _MOST_LINE_BYTES else None
        except ValueError:
            found = None
        if isinstance(found, dict):
            events.append(typed(found, text))
        else:
            num_damaged += not (is_torn and number == len(lines))
    if num_damaged and notes is not None:
        notes.append(damaged(NAME, num_damaged))
    if earlier is not None:
        events.append(typed(earlier, text))
    return events[::-1]


def _of_events() -> Readable:
    return Readable(lines=True, most=_MOST_WORDS)


def _last_lines(path: Path) -> tuple[list[bytes], bool, dict[str, Any] | None]:
    """The last lines that are not empty, whether the last one is incomplete, and the last begin before them. None without a file."""
    try:
        file = reading(path, most_bytes=MOST_LINES_BYTES)
    except FileNotFoundError:
        return [], False, None
    with file:
        begin = max(file.seek(0, os.SEEK_END) - _MOST_BYTES, 0)
        file.seek(begin)
        data = bytearray()
        while len(data) < _MOST_BYTES and (piece := file.read(_MOST_BYTES - len(data))):
            data += piece
        if begin:  # within a line
            first = data.find(b"\n") + 1
            begin += first
            del data[:first]
        is_torn = not data.endswith(b"\n")
        parts = data.rsplit(b"\n", MOST_EVENTS + 1)
        kept = parts[-MOST_EVENTS - 1 :]
        lines = [bytes(line) for line in kept if line]
        if any(len(line) > MOST_LINE_BYTES for line in lines):
            raise too_long(path)
        end = begin + len(data) - sum(map(len, kept)) - len(kept) + 1
        return lines, is_torn, _last_begin(file, end)


def _last_begin(file: BinaryIO, end: int) -> dict[str, Any] | None:
    """The last event "begin" that ends before a place in the file; None without one."""
    tries = iter(range(_MOST_TRIES))
    after, block = b"", 4 << 20
    for at in range(end, max(end - _MOST_EARLIER_BYTES, 0), -block):
        first = max(at - block, 0)
        data = _bytes_of(file, first, at) + after
        if (found := _begin_in(data, tries, is_whole=not first)) is not None:
            return found
        after = data[: data.find(b"\n") + 1][:_MOST_LINE_BYTES]  # the end of a line of the block before
    is_left = end > _MOST_EARLIER_BYTES
    return _begin_in(_bytes_of(file, 0, min(_MOST_LINE_BYTES, end)), tries, is_whole=True) if is_left else None


def _begin_in(data: bytes, tries: Iterator[int], *, is_whole: bool) -> dict[str, Any] | None:
    """The last "begin" among the lines of a part of the file. is_whole: the part begins with a line."""
    at = len(data)
    while (at := data.rfind(_BEGIN, 0, at)) >= 0 and next(tries, None) is not None:
        first, last = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        if last < 0 or (first == 0 and not is_whole):
            continue
        with suppress(ValueError):
            found = json_of(data[first:last])
            if isinstance(found, dict) and found.get("event") == "begin":
                return found
        at = first
    return None


def _bytes_of(file: BinaryIO, first: int, end: int) -> bytes:
    file.seek(first)
    data = bytearray()
    while len(data) < end - first and (piece := file.read(end - first - len(data))):
        data += piece
    return bytes(data)


def typed(event: dict[str, Any], text: Readable | None = None) -> dict[str, Any]:
    """The fields of an event with the types of _TYPES. Those of another type are left out, and fields that are unknown stay.

    `text`: of all events of a file.
    """
    text = text or _of_events()
    found: dict[str, Any] = {}
    for name, value in event.items():
        kind = _TYPES.get(name) or _OF_KINDS.get((str(event.get("event")), name))
        if kind is None:
            found[text(name)] = _unknown(value, text)
        elif value is None:
            found[name] = None
        else:
            given = str(_unknown(value, text)) if kind is str and isinstance(value, int | float) else value
            try:
                found[name] = _readable(msgspec.convert(given, kind), text)
            except ERRORS:
                continue
    if not math.isfinite(seconds_of(found.get("time"))):
        found.pop("time", None)
    return found


def _readable(value: Any, text: Readable) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return text.all(value)
    if isinstance(value, dict):
        return {text(name): _readable(each, text) for name, each in value.items()}
    return _readable(msgspec.structs.asdict(value), text) if isinstance(value, msgspec.Struct) else value


def _unknown(value: Any, text: Readable) -> Any:
    """A value that `words.py` may show."""
    if isinstance(value, str):
        return text(value)
    is_large = isinstance(value, int | float) and not -MOST_FIGURE <= value <= MOST_FIGURE  # also what is no number
    return None if is_large else value


def seconds_of(text: Any) -> float:
    """The time of an event in seconds since 1970; NaN if it is none that a run can have."""
    try:
        seconds = datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return math.nan
    return seconds if 0 <= seconds <= MOST_TIME_S else math.nan
