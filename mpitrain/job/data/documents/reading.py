"""The interface of all readers, and the errors of damaged files."""

import errno
import mmap
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from collectives.texts import shown

T = TypeVar("T")

VERSION = 2
"""Of the readers. Checkpoints and folders of tokens keep it. It grows when a shard gives other documents than before.

1, which is not kept, took `.json`, other names of JSON Lines, and endings in capital letters as text. Of JSON Lines it took lines of
blanks as documents, and could not read those with a byte-order mark, NaN or the like. Of tar files it left out links and sparse files,
or took what is packed of a sparse file, and it read hidden files. `Cut.is_as_before` tells of a part of a shard.
"""

MOST_DOCUMENT_BYTES = 256 << 20
"""A longer document is damaged: a file with holes can have one that no memory holds."""


class DamagedSampleError(ValueError):
    """One document cannot be read. A run may leave out a number of them (`data.max_bad_samples`). The text says where it is."""


class DamagedShardError(ValueError):
    """The rest of a shard cannot be read, because the places of its documents are not known. The text names the shard."""


def in_one_line(text: object, most: int = 500) -> str:
    """A text of another library, or of a file, for a message: in one line, of characters that can be printed."""
    line = shown(" ".join(str(text)[: 4 * most].split()))
    return line if len(line) <= most else f"{line[:most]}..."


class Cut(Protocol):
    """The documents of a part of a shard."""

    def __len__(self) -> int:
        """The number of documents."""

    def key(self, index: int) -> bytes:
        """The name of a document in its source. The split into training and held-out data depends on it alone."""

    def where(self, index: int) -> str:
        """A document, for messages."""

    def text(self, index: int) -> bytes:
        """A document in UTF-8. DamagedSampleError if it cannot be read."""

    def is_as_before(self) -> bool:
        """Whether readers of version 1 gave the same documents. It may read them all."""


def check_length(num_bytes: int, where: str) -> None:
    """DamagedSampleError if a document of so many bytes is too long. `where`: see Cut."""
    if num_bytes > MOST_DOCUMENT_BYTES:
        raise DamagedSampleError(f"{where}: a document with {num_bytes} bytes; expected {MOST_DOCUMENT_BYTES} at most")


def checked_text(cut: Cut, index: int) -> bytes:
    """A document that is UTF-8. DamagedSampleError if it cannot be read, or is something else."""
    text = cut.text(index)
    try:
        if not text.isascii():  # faster than `decode` where it is true
            text.decode()
    except UnicodeDecodeError as error:
        raise DamagedSampleError(f"{cut.where(index)}: expected text in UTF-8: {error}") from None
    return text


class Reader(Protocol):
    """An open shard."""

    remark: str
    """What users should know of the shard, in one line: it is taken for something that it may not be, or parts are left out. Or ""."""

    def cut(self, begin: int, end: int) -> Cut:
        """The documents whose first byte is one of `begin` to `end - 1`. DamagedShardError if they cannot be found."""

    def close(self) -> None:
        """Unmap the file. Cuts of the shard can no longer be used."""


def with_more_files(map_file: Callable[[], T]) -> T:
    """Call `map_file`, which maps a file. A map holds a descriptor: if there are no more, the soft limit of this process (`ulimit -Sn`)
    becomes the hard one, and `map_file` is called again."""
    try:
        return map_file()
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE:
            raise
        if soft == hard:
            raise OSError(
                errno.EMFILE, f"too many open files: a rank has up to 64 shards of each source open, and may have {soft} files "
                "(ulimit -n); raise this limit, or name fewer sources"
            ) from None  # fmt: skip
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return map_file()


class MappedFile:
    """The bytes of a file, mapped into memory. `name`: of the shard, for messages and keys; the file may be an unpacked copy.

    DamagedShardError if the file is empty, OSError if it cannot be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.size, self.bytes = with_more_files(lambda: self._map(path))

    def _map(self, path: Path) -> tuple[int, mmap.mmap]:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if not size:
                raise DamagedShardError(f"{self.name}: the file is empty; expected documents")
            return size, mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap the file, as soon as nobody uses its bytes."""
        with suppress(BufferError):
            self.bytes.close()
