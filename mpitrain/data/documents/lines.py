"""JSON Lines: each line is an object, one field of which is a document's text.

Forms of other programs are read, too: lines that end as in Windows, lines of blanks alone, a byte-order mark, and what Python's
`json.dumps` writes, such as NaN, in other fields.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from mpitrain.data.documents.reading import (
    MOST_DOCUMENT_BYTES,
    DamagedSampleError,
    DamagedShardError,
    MappedFile,
    check_length,
)

_NEWLINE, _BRACE = ord("\n"), ord("{")
_PIECE_BYTES = 1 << 20
_MARK = b"\xef\xbb\xbf"
_NO_TEXT = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r]*")


class LinesReader:
    """An open file of JSON Lines. `name`: see MappedFile. `field`: of the text."""

    remark = ""
    """See Reader."""

    def __init__(self, path: Path, name: str, field: str = "text") -> None:
        self._file, self._field = MappedFile(path, name), field
        # Other fields are passed over without a value of Python for each.
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Line", [("text", str)], rename={"text": field}))

    def cut(self, begin: int, end: int) -> "LinesCut":
        """See Reader. Empty lines, and those of blanks, are no documents."""
        first, last = self._line_from(begin), self._line_from(end)
        found = [np.empty(0, np.int64)]
        for at in range(first, last, _PIECE_BYTES):
            piece = np.frombuffer(self._file.bytes, np.uint8, min(_PIECE_BYTES, last - at), at)
            found.append(at + np.flatnonzero(piece == _NEWLINE))
        ends = np.concatenate(found)
        if last > first and (not len(ends) or ends[-1] != last - 1):
            ends = np.append(ends, last)  # the last line may lack its end
        begins = np.concatenate(([first], ends[:-1] + 1))[: len(ends)]
        kept = ends > begins
        begins, ends = begins[kept], ends[kept]
        heads = np.frombuffer(self._file.bytes, np.uint8)[begins]
        if (is_odd := heads != _BRACE).any():
            begins, ends = self._without_blanks(begins, ends, np.flatnonzero(is_odd).tolist())
        return LinesCut(self, begins, ends)

    def close(self) -> None:
        """See Reader."""
        self._file.close()

    def text(self, begin: int, end: int) -> bytes:
        """The text of the line from byte `begin` to `end - 1`."""
        if end - begin > MOST_DOCUMENT_BYTES:
            check_length(end - begin, self.where(begin))
        line = self._file.bytes[begin:end]
        try:
            try:
                text: str = self._decoder.decode(line).text  # type: ignore[attr-defined]
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError as error:
                text = self._text_of_python(line, error)
            return text.encode()
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise DamagedSampleError(
                f"{self.where(begin)}: expected an object with text in {self._field!r}, or in "
                f"another field that data.field names: {error}"
            ) from None

    def where(self, begin: int) -> str:
        """A line, for messages."""
        return f"{self._file.name}, the line at byte {begin}"

    def key(self, begin: int) -> bytes:
        """A line has no name: the place where it begins is its key, with the name of the file."""
        return f"{self._file.name}:{begin}".encode(errors="surrogateescape")

    def _text_of_python(self, line: bytes, error: msgspec.DecodeError) -> str:
        """The text of a line with what Python's `json` writes, and JSON has not: NaN, Infinity and halves of surrogate pairs in other
        fields. `error` is raised for other lines."""
        try:
            found = json.loads(line.decode())
        except ValueError:
            raise error from None
        text = found.get(self._field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise error
        return text

    def _without_blanks(
        self, begins: np.ndarray, ends: np.ndarray, odd: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The lines that have more than blanks. Those with a byte-order mark begin after it. `odd`: those that do not begin with {."""
        data, kept = self._file.bytes, np.ones(len(begins), np.bool_)
        for index in odd:
            begin, end = int(begins[index]), int(ends[index])
            found = _NO_TEXT.match(data, begin, end)
            kept[index] = found is None or found.end() < end
            if data[begin : min(begin + len(_MARK), end)] == _MARK:
                begins[index] = begin + len(_MARK)
        return begins[kept], ends[kept]

    def _line_from(self, at: int) -> int:
        """The first line that begins at byte `at` or later."""
        if at <= 0:
            return 0
        size, at = self._file.size, min(at, self._file.size)
        found = self._file.bytes.find(b"\n", at - 1, at + MOST_DOCUMENT_BYTES)
        # Else each part of the file would look for the end of the same line.
        if found < 0 and at + MOST_DOCUMENT_BYTES < size:
            raise DamagedShardError(
                f"{self._file.name}: no line ends in {MOST_DOCUMENT_BYTES} bytes after byte {at}; expected JSON Lines"
            )
        return size if found < 0 else found + 1


class LinesCut:
    """Neighbouring lines. See Cut."""

    def __init__(self, reader: LinesReader, begins: np.ndarray, ends: np.ndarray) -> None:
        self._reader, self._begins, self._ends = reader, begins, ends

    def __len__(self) -> int:
        return len(self._begins)

    def key(self, index: int) -> bytes:
        return self._reader.key(int(self._begins[index]))

    def where(self, index: int) -> str:
        return self._reader.where(int(self._begins[index]))

    def text(self, index: int) -> bytes:
        return self._reader.text(int(self._begins[index]), int(self._ends[index]))
