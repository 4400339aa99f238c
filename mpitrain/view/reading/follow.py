"""The new lines of a file that another process writes, perhaps on another host: see `Follower`."""

from pathlib import Path
from typing import NamedTuple

from mpitrain.files import BLOCK_BYTES, MOST_LINE_BYTES, MOST_LINES_BYTES, reading, too_long
from mpitrain.job.record.parsing.lines import Line, decode

_TAIL_BYTES = 256
_MOST_SKIPPED = 8
"""Blocks in a row without the end of a line: the file has something else than lines."""


class News(NamedTuple):
    """What one read has found."""

    lines: list[Line]
    is_anew: bool
    """The file was cut, replaced or removed: all lines of earlier reads are void."""
    has_more: bool
    """The file has more lines already."""
    num_damaged: int = 0
    """Lines that were left out: see `LineBlock`."""


class Follower:
    """Reads a file of lines of JSON as it grows. The file may appear later; a last line is read when it is complete.

    A resume cuts the file, and the steps that are done again may have made it longer than before until the next look. So the last bytes
    that were read are compared each time. The file is opened for each read: NFS checks then whether its copy is still valid.
    """

    def __init__(self, path: Path, *, last_bytes: int | None = None, of_ranks: bool = False) -> None:
        """`last_bytes`: the first read begins so many bytes before the end; None: at the beginning. `of_ranks`: see `decode`."""
        self._path, self._last_bytes, self._of_ranks = path, last_bytes, of_ranks
        self._offset, self._tail, self._num_skipped = 0, b"", 0

    def read(self) -> News:
        """The lines since the last read, at most a block of them. OSError, also if the file has no lines at all."""
        was_read = self._offset > 0
        try:
            file = reading(self._path, most_bytes=MOST_LINES_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            self._offset, self._tail = 0, b""
            return News([], was_read, False)
        with file:
            file.seek(self._offset - len(self._tail))
            is_anew = was_read and file.read(len(self._tail)) != self._tail
            if is_anew or not was_read:
                self._offset, self._tail = self._beginning(file.seek(0, 2)), b""
            begins_within = self._offset > 0 and not self._tail  # of a line
            file.seek(self._offset)
            block = file.read(BLOCK_BYTES)
            if len(block) == BLOCK_BYTES and b"\n" not in block:
                block += file.read(MOST_LINE_BYTES - BLOCK_BYTES)
            text = block[: block.rfind(b"\n") + 1]
            if not text and len(block) == MOST_LINE_BYTES:
                text = block  # no line is so long: it is damaged, and left out
            self._num_skipped = self._num_skipped + 1 if text and not text.endswith(b"\n") else 0
            if self._num_skipped >= _MOST_SKIPPED:
                raise too_long(self._path)
            if text:
                self._offset += len(text)
                self._tail = text[-_TAIL_BYTES:]
            has_more = bool(text) and len(block) >= BLOCK_BYTES
            if begins_within:
                text = text[text.find(b"\n") + 1 :]
            lines, num_damaged = decode(text, of_ranks=self._of_ranks)
            return News(lines, is_anew, has_more, num_damaged)

    def _beginning(self, size: int) -> int:
        """Where to begin in a file of this size, one byte early: what follows up to the end of a line is left out."""
        return 0 if self._last_bytes is None else max(size - self._last_bytes - 1, 0)
