"""Lines of JSON of a file, decoded in blocks to figures: names with numbers, or for ranks names with lists of numbers.

Lines that are torn, or are no object with a whole number `step`, are left out. So are values of another type, and numbers that no run
has: a reader can calculate with what is left.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from mpitrain.files import blocks_of_lines

Line = dict[str, Any]
MOST_STEP = 2**31 - 1
MOST_TIME_S = 2.0**33
"""In the year 2242."""
MOST_FIGURE = 1e100
"""A larger number counts as one that is not finite, so that its square still is a float."""
_MOST_OF_RANK = 1e25
"""The same for a float32."""
MOST_RANKS = 50_000


class LineBlock(NamedTuple):
    """Lines of a file, in its order."""

    lines: list[Line]
    num_damaged: int
    """Lines that were left out. The incomplete last line of a file, which is being written or was when its writer died, is none."""


_Figure = Annotated[float, msgspec.Meta(ge=-MOST_FIGURE, le=MOST_FIGURE)] | bool | None
_OfRank = Annotated[float, msgspec.Meta(ge=-_MOST_OF_RANK, le=_MOST_OF_RANK)] | None
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEP)]


_List = Annotated[list[_OfRank], msgspec.Meta(max_length=MOST_RANKS)]


class _Ranks(msgspec.Struct, omit_defaults=True):
    """A line of ranks.jsonl: see record/ranks.py."""

    step: _Count
    num_ranks: _Count | None = None
    ranks: dict[str, _List] | None = None
    summary: dict[str, _List] | None = None
    gauges: dict[str, _List] | None = None


_FIGURES: "msgspec.json.Decoder[dict[str, Any]]" = msgspec.json.Decoder(dict[str, _Figure])
_RANKS = msgspec.json.Decoder(_Ranks)
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ONE_FIGURE, _ONE_COUNT = msgspec.json.Decoder(_Figure), msgspec.json.Decoder(_Count)
_ONE_LIST = msgspec.json.Decoder(_List)
ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Of msgspec, for a text that is not as expected."""


def read_blocks(path: Path, *, of_ranks: bool = False) -> Iterator[LineBlock]:
    """The lines of a file, those of ranks.jsonl with `of_ranks`. A missing file has none. Raises OSError."""
    try:
        for text, is_torn in blocks_of_lines(path):
            found = decode(text, of_ranks=of_ranks)
            yield LineBlock(found.lines, 0) if is_torn else found
    except FileNotFoundError:
        return


def decode(text: bytes, *, of_ranks: bool = False) -> LineBlock:
    """The objects of lines."""
    decoder: Any = _RANKS if of_ranks else _FIGURES
    take: Callable[[Any], Line | None] = _of_ranks if of_ranks else _of_figures
    mend: Callable[[bytes], Any] = _mended_ranks if of_ranks else _mended_figures
    lines: list[Any]
    try:
        lines = decoder.decode_lines(text)
    except ERRORS:
        lines = [_decode_one(line, decoder, mend) for line in text.split(b"\n") if line]
    found = [figures for line in lines if line is not None and (figures := take(line)) is not None]
    return LineBlock(found, len(lines) - len(found))


def _of_figures(line: Line) -> Line | None:
    step = line.get("step")
    if type(step) is not float or not (0 <= step <= MOST_STEP and step.is_integer()):
        return None
    line["step"] = int(step)
    time = line.get("time")
    if time is not None and not 0 <= time <= MOST_TIME_S:
        line["time"] = None
    return line


def _of_ranks(line: _Ranks) -> Line:
    found: Line = {"step": line.step}
    if line.ranks:  # these tell their number, whatever the line says
        found |= {"ranks": line.ranks, "num_ranks": max(map(len, line.ranks.values()))}
    elif line.num_ranks:
        found["num_ranks"] = line.num_ranks
    if line.summary:
        found["summary"] = {name: its for name, its in line.summary.items() if len(its) == 4}
    if line.gauges:
        found["gauges"] = line.gauges
    return found


def _decode_one(line: bytes, decoder: Any, mend: Callable[[bytes], Any]) -> Any:
    """The object of a line, without the values of another type; None if it is none."""
    try:
        return decoder.decode(line)
    except ERRORS:
        pass
    try:
        return mend(line)
    except ERRORS:
        return None


def _mended_figures(line: bytes) -> Line:
    return _of_type(_PARTS.decode(line), _ONE_FIGURE)


def _mended_ranks(line: bytes) -> _Ranks:
    parts = _PARTS.decode(line)
    numbers = _of_type({name: its for name, its in parts.items() if name == "num_ranks"}, _ONE_COUNT)
    lists: dict[str, Any] = {}
    for name in ("ranks", "summary", "gauges"):
        try:
            lists[name] = _of_type(_PARTS.decode(parts.get(name, b"{}")), _ONE_LIST)
        except ERRORS:
            continue
    return _Ranks(_ONE_COUNT.decode(parts.get("step", b"")), num_ranks=numbers.get("num_ranks"), **lists)


def _of_type(parts: Mapping[str, msgspec.Raw], decoder: Any) -> dict[str, Any]:
    """The values that the decoder takes."""
    found = {}
    for name, value in parts.items():
        try:
            found[name] = decoder.decode(value)
        except ERRORS:
            continue
    return found
