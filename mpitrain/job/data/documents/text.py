"""Plain text: a file is a document. A long one is several, each of whole lines, so that no document needs much memory."""

from bisect import bisect_left
from pathlib import Path

from mpitrain.job.data.documents.heads import HEAD_BYTES, begins_with_json, other_format
from mpitrain.job.data.documents.reading import MOST_DOCUMENT_BYTES, DamagedShardError, MappedFile, check_length

MOST_BYTES = 1 << 20
"""A longer file is cut at the first end of a line after each multiple of this number of bytes."""


class TextReader:
    """An open text file. `name`: see MappedFile. DamagedShardError if it is a file of another format that another name would tell."""

    def __init__(self, path: Path, name: str) -> None:
        self._file = MappedFile(path, name)
        head = self._file.bytes[:HEAD_BYTES]
        if other := other_format(head):
            self.close()
            raise DamagedShardError(f"{name}: expected text, got a file that is {other}")
        self.remark = (
            f"{name} is taken as text, and begins with JSON; files of JSON Lines have the ending .jsonl, .ndjson or .json, also before "
            ".gz and .zst"
        ) * begins_with_json(head)
        """See Reader."""
        self._begins = [0]  # of the documents
        for at in range(MOST_BYTES, self._file.size, MOST_BYTES):
            if at > self._begins[-1]:
                end = self._file.bytes.find(b"\n", at - 1, at + MOST_DOCUMENT_BYTES)
                if not 0 <= end < self._file.size - 1:
                    break
                self._begins.append(end + 1)

    def cut(self, begin: int, end: int) -> "TextCut":
        """See Reader."""
        first, last = bisect_left(self._begins, begin), bisect_left(self._begins, end)
        ends = [*self._begins[1:], self._file.size]
        return TextCut(self._file, list(zip(self._begins[first:last], ends[first:last], strict=True)))

    def close(self) -> None:
        """See Reader."""
        self._file.close()


class TextCut:
    """Neighbouring parts of a text. See Cut."""

    def __init__(self, file: MappedFile, pairs: list[tuple[int, int]]) -> None:
        self._file, self._pairs = file, pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def key(self, index: int) -> bytes:
        begin = self._pairs[index][0]
        return (self._file.name + f":{begin}" * (begin > 0)).encode(errors="surrogateescape")

    def where(self, index: int) -> str:
        return self.key(index).decode(errors="replace")

    def text(self, index: int) -> bytes:
        begin, end = self._pairs[index]
        check_length(end - begin, self.where(index))
        return self._file.bytes[begin:end]

    def is_as_before(self) -> bool:
        return True
