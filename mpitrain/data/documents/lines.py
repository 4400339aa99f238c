"""JSON Lines: each line is an object, one field of which is a document's text."""

from pathlib import Path

import msgspec
import numpy as np

from mpitrain.data.documents.reading import DamagedSampleError, MappedFile

_NEWLINE = ord("\n")
_PIECE_BYTES = 1 << 20


class LinesReader:
    """An open file of JSON Lines. `name`: see MappedFile. `field`: of the text."""

    def __init__(self, path: Path, name: str, field: str = "text") -> None:
        self._file, self._field = MappedFile(path, name), field
        # Other fields are passed over without a value of Python for each.
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Line", [("text", str)], rename={"text": field}))

    def cut(self, begin: int, end: int) -> "LinesCut":
        """See Reader. Empty lines are no documents."""
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
        return LinesCut(self, begins[kept], ends[kept])

    def close(self) -> None:
        """See Reader."""
        self._file.close()

    def text(self, begin: int, end: int) -> bytes:
        """The text of the line from byte `begin` to `end - 1`."""
        line = self._file.bytes[begin:end]
        try:
            text: str = self._decoder.decode(line).text  # type: ignore[attr-defined]
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

    def _line_from(self, at: int) -> int:
        """The first line that begins at byte `at` or later."""
        if at <= 0:
            return 0
        found = self._file.bytes.find(b"\n", min(at, self._file.size) - 1)
        return self._file.size if found < 0 else found + 1


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
