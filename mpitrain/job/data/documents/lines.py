"""JSON Lines: each line is an object, one field of which is a document's text.

Forms of other programs are read, too: lines that end as in Windows, lines of blanks alone, a byte-order mark, and what Python's
`json.dumps` writes, such as NaN, in other fields.
"""

import json
from array import array
from pathlib import Path

import msgspec
import numpy as np

from mpitrain.job.data.documents.heads import HEAD_BYTES, begins_with_json, other_than
from mpitrain.job.data.documents.reading import (
    MOST_DOCUMENT_BYTES,
    DamagedSampleError,
    DamagedShardError,
    MappedFile,
    check_length,
)

MOST_LINES = 1 << 25
"""Of a part. The places of a line take 12 bytes: of so many lines 400 MB."""

_NEWLINE, _BRACE = ord("\n"), ord("{")
_PIECE_BYTES = 1 << 20
_MOST_LENGTH = (1 << 32) - 1
_MOST_PYTHON_BYTES = 32 << 20  # Python's `json` takes up to 16 times as much memory
_MARK = b"\xef\xbb\xbf"
_BLANKS = b" \t\r"
_IS_BLANK = np.isin(np.arange(256), list(_BLANKS))
_MOST_BLANKS = 64  # at the begin of lines that are looked at together


class LinesReader:
    """An open file of JSON Lines. `name`: see MappedFile. `field`: of the text."""

    remark = ""
    """See Reader."""

    def __init__(self, path: Path, name: str, field: str = "text") -> None:
        self._file, self._field = MappedFile(path, name), field
        head = self._file.bytes[:HEAD_BYTES]
        if not begins_with_json(head) and (other := other_than("JSON Lines", head)):
            self.close()
            raise DamagedShardError(f"{name}: {other}")
        # Other fields are passed over without a value of Python for each.
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Line", [("text", str)], rename={"text": field}))

    def cut(self, begin: int, end: int) -> "LinesCut":
        """See Reader. Empty lines, and those of blanks, are no documents."""
        first, last = self._line_from(begin), self._line_from(end)
        data = np.frombuffer(self._file.bytes, np.uint8)
        begins, lengths = array("q"), array("I")  # they grow without a copy
        start, has_odd = first, False  # the begin of the line that the next piece ends
        for at in range(first, last, _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, last)
            its_ends = at + np.flatnonzero(data[at:stop] == _NEWLINE)
            if stop == last and (not len(its_ends) or its_ends[-1] != last - 1):
                its_ends = np.append(its_ends, last)  # the last line may lack its end
            if len(its_ends):
                its_begins = np.append(start, its_ends[:-1] + 1)
                start = int(its_ends[-1]) + 1
                its_begins, its_ends, is_odd = _with_text(data, its_begins, its_ends)
                begins.frombytes(its_begins.tobytes())
                lengths.frombytes(np.minimum(its_ends - its_begins, _MOST_LENGTH).astype(np.uint32).tobytes())
                has_odd |= is_odd
                if len(begins) > MOST_LINES:
                    raise DamagedShardError(
                        f"{self._file.name}: more than {MOST_LINES} lines in a part, of which a compressed shard is one; expected "
                        "smaller shards"
                    )
        return LinesCut(self, begins, lengths, has_odd)

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
            found = json.loads(line.decode()) if len(line) <= _MOST_PYTHON_BYTES else None
        except ValueError:
            raise error from None
        text = found.get(self._field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise error
        return text

    def is_of_python(self, begin: int, end: int) -> bool:
        """Whether the line from byte `begin` to `end - 1` is read, and is not as JSON asks: see `_text_of_python`."""
        try:
            self.text(begin, end)
            self._decoder.decode(self._file.bytes[begin:end])
        except DamagedSampleError:
            return False
        except msgspec.DecodeError:
            return True
        return False

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


def _with_text(data: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """The lines that have more than blanks, and whether there are others, that are not empty, or byte-order marks.

    Lines with a mark begin after it. `data`: the file, uint8.
    """
    kept = ends > begins
    begins, ends = begins[kept], ends[kept]
    odd = np.flatnonzero(data[begins] != _BRACE)
    if not len(odd):
        return begins, ends, False
    long = odd[ends[odd] - begins[odd] >= len(_MARK)]
    marked = long[np.all([data[begins[long] + place] == byte for place, byte in enumerate(_MARK)], axis=0)]
    begins[marked] += len(_MARK)
    kept = np.ones(len(begins), np.bool_)
    left, places = odd, begins[odd]  # lines of which all bytes before a place are blanks
    for _ in range(_MOST_BLANKS):
        has_more = places < ends[left]
        kept[left[~has_more]] = False
        left, places = left[has_more], places[has_more]
        is_blank = _IS_BLANK[data[places]]
        left, places = left[is_blank], places[is_blank] + 1
        if not len(left):
            break
    for index, place in zip(left.tolist(), places.tolist(), strict=True):
        end = min(int(ends[index]), place + MOST_DOCUMENT_BYTES)
        kept[index] = bool(data[place:end].tobytes().strip(_BLANKS))
    return begins[kept], ends[kept], bool(len(marked)) or not kept.all()


class LinesCut:
    """Neighbouring lines: where they begin, and their bytes. See Cut. `has_odd`: see `_with_text`."""

    def __init__(self, reader: LinesReader, begins: "array[int]", lengths: "array[int]", has_odd: bool) -> None:
        self._reader, self._begins, self._lengths, self._has_odd = reader, begins, lengths, has_odd

    def __len__(self) -> int:
        return len(self._begins)

    def key(self, index: int) -> bytes:
        return self._reader.key(self._begins[index])

    def where(self, index: int) -> str:
        return self._reader.where(self._begins[index])

    def text(self, index: int) -> bytes:
        begin = self._begins[index]
        return self._reader.text(begin, begin + self._lengths[index])

    def is_as_before(self) -> bool:
        lines = zip(self._begins, self._lengths, strict=True)
        return not self._has_odd and not any(self._reader.is_of_python(at, at + length) for at, length in lines)
