"""RUN/metrics.csv: one row per step, one column per figure, with an empty field for what is not known or not finite."""

import csv
import io
import math
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mpitrain.files import BLOCK_BYTES, MOST_LINE_BYTES, making, open_regular, partial_of, write_all
from mpitrain.job.record.sinks.sink import About, Figures, Sink

_MOST_BYTES = 4 << 30
"""Of the file, which is read at the start."""
_MOST_HEAD_BYTES = 1 << 20
"""Of the names of the columns."""


class CsvFile(Sink):
    """The sink `csv`. Floats have as many digits as it takes to read back the same bits.

    An evaluation goes into the row of its step. A figure that is new in a step makes a new column; the file is then written anew beside
    the old one, which it replaces (0.1 s for 50 MB).
    """

    _path: Path

    def __init__(self) -> None:
        self._file: BinaryIO | io.FileIO | None = None
        self._columns = ["step"]
        self._end = 0  # of the file
        self._row: dict[str, str] = {}  # the last one
        self._rows_at = 0  # the place of the first one in the file
        self._row_at = 0  # the place of the last one

    def open(self, about: About) -> None:
        self._path = about.folder / "metrics.csv"
        fd = open_regular(self._path, os.O_RDWR | os.O_CREAT, most_bytes=_MOST_BYTES)
        self._file = file = io.FileIO(fd, "r+b")
        columns, self._row, self._rows_at, self._row_at, self._end = _kept(file, about.steps_done)
        file.truncate(self._end)
        self._columns = columns or ["step"]
        if not columns:
            self._write(0, _line(self._columns))
            self._rows_at = self._end

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
        self._columns += names
        rewritten = partial_of(self._path)
        file = making(rewritten)
        try:
            rows_at, end = self._copy_rows(file, b"," * len(names) + b"\n")
            rewritten.replace(self._path)
        except OSError:
            file.close()
            rewritten.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self._rows_at, self._row_at, self._end = file, rows_at, end, end

    def _copy_rows(self, file: BinaryIO, line_end: bytes) -> tuple[int, int]:
        """Write the columns and all rows but the last one, which is written next. The places behind the columns and behind all.

        `line_end`: of each row. No field of a row has a line break.
        """
        assert self._file is not None
        head, at, num_bytes = _line(self._columns), self._rows_at, 0
        write_all(file, head)
        while piece := os.pread(self._file.fileno(), min(BLOCK_BYTES, self._row_at - at), at):
            at += len(piece)
            rows = piece.replace(b"\n", line_end)
            write_all(file, rows)
            num_bytes += len(rows)
        return len(head), len(head) + num_bytes


class _Kept(NamedTuple):
    """What stays of a file."""

    columns: list[str]
    row: dict[str, str]
    """The last one."""
    rows_at: int
    row_at: int
    end: int


def _kept(file: io.FileIO, steps: int) -> _Kept:
    """What stays of a file to go on after `steps` steps. It is read line by line.

    The first line that is not whole, or of a later step, ends it. No columns if the header is not whole.
    """
    lines = io.BufferedReader(file, BLOCK_BYTES)
    try:
        head = lines.readline(_MOST_HEAD_BYTES)
        columns = _columns(head) if head.startswith(b"step") and head.endswith(b"\n") else []
        if columns[:1] != ["step"]:
            return _Kept([], {}, 0, 0, 0)
        at, end, row = 0, len(head), b""
        while (line := lines.readline(MOST_LINE_BYTES)).endswith(b"\n") and line.isascii():
            first, _, _ = line[:-1].partition(b",")
            is_row = first.isdigit() and len(first) < 16 and line.count(b",") == len(columns) - 1
            if not is_row or int(first) > steps:
                break
            at, end, row = end, end + len(line), line
        fields = row[:-1].decode().split(",") if row else []
        found = {name: field for name, field in zip(columns, fields, strict=False) if field}
        return _Kept(columns, found, len(head), at, end)
    finally:
        lines.detach()


def _columns(head: bytes) -> list[str]:
    try:
        return next(csv.reader([head[:-1].decode(errors="replace")]), [])
    except csv.Error:  # a name of more than 131,072 characters
        return []


def _line(names: list[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(names)
    return line.getvalue().encode()


def _text(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return str(int(value)) if isinstance(value, int) else repr(float(value))
