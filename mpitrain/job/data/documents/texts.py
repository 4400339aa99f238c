"""Many texts that are read one by one: in memory up to a limit, the rest in a temporary file."""

import os
import tempfile
import weakref
from bisect import bisect_right
from typing import Any, BinaryIO, NamedTuple

import numpy as np


class _Piece(NamedTuple):
    """Texts that follow one another: the text of `first + i` has the bytes `begins[i]` to `begins[i + 1] - 1`."""

    first: int
    last: int  # the one after the last text
    begins: memoryview  # of integers: NumPy's would take twice as long
    missing: np.ndarray | None  # of which texts there is none
    memory: memoryview | None  # None: the bytes are in the file


_LARGE = 4 << 20
_NONE = _Piece(0, 0, memoryview(b""), None, None)


class Texts:
    """Texts that are added once, in order.

    Args:
        held_bytes: the most bytes of texts in memory. What is more goes into a file without a name in $TMPDIR, else /tmp.
    """

    def __init__(self, held_bytes: int) -> None:
        self._held_bytes = held_bytes
        self._pieces: list[_Piece] = []
        self._firsts: list[int] = []  # text of each piece
        self._last = _NONE  # piece that was asked for
        self._file: BinaryIO | None = None
        self.num_bytes = self.num = 0

    def add(self, begins: np.ndarray, data: memoryview, missing: np.ndarray | None = None) -> None:
        """Add texts: the bytes `begins[i]` to `begins[i + 1] - 1` of `data`. `missing`: of which texts there is none.

        OSError if the file cannot be written.
        """
        first, last = int(begins[0]), int(begins[-1])
        memory: memoryview | None = data
        if self.num_bytes + last - first > self._held_bytes:
            at = self._write(data[first:last])
            begins, memory = begins.astype(np.int64) + (at - first), None
        elif len(data) > _LARGE:  # a buffer that grew as it was filled takes up to twice as much
            memory = memoryview(bytes(data))
        after = self.num + len(begins) - 1
        self._pieces.append(_Piece(self.num, after, begins.data, missing, memory))
        self._firsts.append(self.num)
        self.num = after
        self.num_bytes += last - first

    def __getitem__(self, index: int) -> bytes | None:
        """A text; None if there is none."""
        first, last, begins, missing, memory = self._last
        if not first <= index < last:
            self._last = self._pieces[bisect_right(self._firsts, index) - 1]
            first, last, begins, missing, memory = self._last
        at = index - first
        if missing is not None and missing[at]:
            return None
        if memory is not None:
            return memory[begins[at] : begins[at + 1]].tobytes()
        assert self._file is not None
        return _read(self._file.fileno(), begins[at], begins[at + 1])

    def _write(self, data: Any) -> int:
        """Append bytes to the file. Returns where they begin."""
        folder = tempfile.gettempdir()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (until these texts are gone)
                weakref.finalize(self, self._file.close)
            at = self._file.tell()
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"texts beyond {self._held_bytes} bytes cannot be written into {folder}: {error.strerror}; $TMPDIR names another one",
            ) from None
        return at


def _read(fd: int, begin: int, end: int) -> bytes:
    """Bytes of a file. The system gives at most 2 GiB at a time."""
    data = os.pread(fd, end - begin, begin)
    while begin + len(data) < end:
        data += os.pread(fd, end - begin - len(data), begin + len(data))
    return data
