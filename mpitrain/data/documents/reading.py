"""The interface of all readers, and the errors of damaged files."""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class DamagedSampleError(ValueError):
    """One document cannot be read. A run may leave out a number of them (`data.max_bad_samples`). The text says where it is."""


class DamagedShardError(ValueError):
    """The rest of a shard cannot be read, because the places of its documents are not known. The text names the shard."""


class Cut(Protocol):
    """The documents of a part of a shard."""

    def __len__(self) -> int:
        """The number of documents."""

    def key(self, index: int) -> bytes:
        """The name of a document in its source. The split into training and held-out data depends on it alone."""

    def text(self, index: int) -> bytes:
        """A document in UTF-8. DamagedSampleError if it cannot be read."""


class Reader(Protocol):
    """An open shard."""

    def cut(self, begin: int, end: int) -> Cut:
        """The documents whose first byte is one of `begin` to `end - 1`. DamagedShardError if they cannot be found."""

    def close(self) -> None:
        """Unmap the file. Cuts of the shard can no longer be used."""


class MappedFile:
    """The bytes of a file, mapped into memory. `name`: of the shard, for messages and keys; the file may be an unpacked copy.

    DamagedShardError if the file is empty, OSError if it cannot be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(fd).st_size
            if not self.size:
                raise DamagedShardError(f"{name}: the file is empty; expected documents")
            self.bytes = mmap.mmap(fd, self.size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self.name = name

    def close(self) -> None:
        """Unmap the file, as soon as nobody uses its bytes."""
        with suppress(BufferError):
            self.bytes.close()
