"""RUN/metrics.csv: one row per step, one column per figure, with an empty field for what is not known or not finite."""

import csv
import io
import math
import os
from pathlib import Path
from typing import BinaryIO

from mpitrain.files import making, open_regular, partial_of
from mpitrain.monitor.sinks.sink import About, Figures, Sink

_MOST_BYTES = 4 << 30
"""Of the file, which is read at the start."""


class CsvFile(Sink):
    """The sink `csv`. Floats have as many digits as it takes to read back the same bits.

    An evaluation goes into the row of its step. A figure that is new in a step makes a new column; the file is then written anew beside
    the old one, which it replaces (0.1 s for 50 MB).
    """

    _path: Path

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._columns = ["step"]
        self._end = 0  # of the file
        self._row: dict[str, str] = {}  # the last one
        self._row_at = 0  # its place in the file

    def open(self, about: About) -> None:
        self._path = about.folder / "metrics.csv"
        fd = open_regular(self._path, os.O_RDWR | os.O_CREAT, most_bytes=_MOST_BYTES)
        self._file = os.fdopen(fd, "r+b", buffering=0)
        columns, self._row, self._end, self._row_at = _kept(self._file.read(), about.steps_done)
        self._file.truncate(self._end)
        self._columns = columns or ["step"]
        if not columns:
            self._write(0, _line(self._columns))

    def step(self, step: int, figures: Figures) -> None:
        self._row, self._row_at = {"step": str(step)}, self._end
        self._add(figures)

    def evaluation(self, step: int, figures: Figures) -> None:
        if self._row.get("step") != str(step):
            self._row, self._row_at = {"step": str(step)}, self._end
        # The time of the row is that of its step.
        self._add({name: value for name, value in figures.items() if name != "time" or "time" not in self._row})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _add(self, figures: Figures) -> None:
        """Add figures to the last row, and write it over what is there, which stays whole if the process is killed."""
        self._row |= {name: _text(value) for name, value in figures.items() if name != "step"}
        if len(self._row) > len(self._columns) or not self._row.keys() <= set(self._columns):
            self._add_columns([name for name in self._row if name not in self._columns])
        row = self._row
        self._write(self._row_at, (",".join([row.get(name, "") for name in self._columns]) + "\n").encode())

    def _write(self, at: int, line: bytes) -> None:
        assert self._file is not None
        if os.pwrite(self._file.fileno(), line, at) < len(line):
            raise OSError(f"{self._path} cannot be written: the disk may be full")
        if at + len(line) < self._end:
            self._file.truncate(at + len(line))
        self._end = at + len(line)

    def _add_columns(self, names: list[str]) -> None:
        assert self._file is not None
        if broken := [name for name in names if "\n" in name or "\r" in name]:
            raise ValueError(f"{self._path}: expected names without line breaks, got {broken[0]!r}")
        self._file.seek(0)
        _, _, rows = self._file.read().partition(b"\n")
        before = rows[: len(rows) - (self._end - self._row_at)]  # without the last row, which is written next
        self._columns += names
        head = _line(self._columns)
        rewritten = partial_of(self._path)
        file = making(rewritten)
        try:
            # No field of a row has a line break.
            text = head + before.replace(b"\n", b"," * len(names) + b"\n")
            if file.write(text) < len(text):
                raise OSError(f"{rewritten} cannot be written: the disk may be full")
            rewritten.replace(self._path)
        except OSError:
            file.close()
            rewritten.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self._end, self._row_at = file, len(text), len(text)


def _kept(text: bytes, steps: int) -> tuple[list[str], dict[str, str], int, int]:
    """What stays of a file to go on after `steps` steps: the columns, the last row, and the places of its end and of its beginning.

    The first line that is not whole, or of a later step, ends it. No columns if the header is not whole.
    """
    head, is_whole, _ = text.partition(b"\n")
    columns = next(csv.reader([head.decode(errors="replace")]), [])
    if not is_whole or columns[:1] != ["step"]:
        return [], {}, 0, 0
    at, end = 0, len(head) + 1
    while (newline := text.find(b"\n", end)) >= 0:
        first, _, _ = text[end:newline].partition(b",")
        is_row = first.isdigit() and len(first) < 16 and text.count(b",", end, newline) == len(columns) - 1
        if not is_row or int(first) > steps:
            break
        at, end = end, newline + 1
    fields = text[at : end - 1].decode().split(",") if at else []
    return columns, {name: field for name, field in zip(columns, fields, strict=False) if field}, end, at


def _line(names: list[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(names)
    return line.getvalue().encode()


def _text(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return str(int(value)) if isinstance(value, int) else repr(float(value))
