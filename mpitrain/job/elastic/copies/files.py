"""A copy: the boxes that one rank holds, in one file of the node's shared memory.

    copy-RUN-JOB-EPOCH-RANK.GENERATION     a rank's own copy
    copy-RUN-JOB-EPOCH-RANKp.GENERATION    the copy for a rank of another node
    copy-RUN-held                          see holding.py

The folder is one of folders.py. RUN names the run, by which a later job finds the copies. JOB names the job of the batch system, such
as job4711, by which an epilog may remove them; "local" without one. EPOCH is the set of ranks: each launch and each loss begins a new
one. The ranks use two generations in turn: one is complete while the other is written. A file holds the word "complete" only while its
contents are whole:

    8 bytes  "complete" or "writing."     8 bytes  place of the header     8 bytes  length of the header
    from byte 4096 on: the boxes, each aligned to 64 bytes; then the header (JSON)

A rank locks its files (flock) while it has them mapped. The kernel removes the lock with the process, the file stays.
"""

import errno
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ckpt.format.boxes import Box
from ckpt.tensors import Local
from collectives.files import OddFileError, open_regular
from mpitrain.job.elastic.copies.folders import files_in_own_folders, opened, own_folder, tidy

_COMPLETE, _WRITING = b"complete", b"writing."
_DATA_AT = 4096
_ALIGN = 64
_NOT_IN_NAMES = r"[^\w.\[\]]"  # a minus sign separates the parts of a name
_SPARE_BYTES = 1 << 16  # for longer headers of later steps


class CopyPart(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor of full shape `full`: `shape` elements from `offset` on, stored from byte `at` of the data on."""

    name: str
    dtype: str
    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    at: int

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


class Header(msgspec.Struct, frozen=True):
    """The description of a copy: of rank `rank` of `size`, after `step` steps. `nbytes`: of the data."""

    step: int
    epoch: int
    rank: int
    size: int
    nbytes: int
    parts: tuple[CopyPart, ...]
    meta: dict[str, Any]

    @property
    def state(self) -> "StateKey":
        return StateKey(self.epoch, self.step, self.size)


class StateKey(NamedTuple):
    """The state to which a copy belongs: the copies of all `size` ranks make it whole. A later one is greater."""

    epoch: int
    step: int
    size: int


def path_of(run: str, epoch: int, rank: int, generation: int, *, for_partner: bool = False) -> Path:
    """The file of a copy of this job. OSError if there is no folder for it."""
    return own_folder() / f"{prefix(run)}{_job()}-{epoch:08d}-{rank:05d}{'p' * for_partner}.{generation}"


def prefix(run: str) -> str:
    """The beginning of the names of a run's copies."""
    return f"copy-{run}-"


def files_of(run: str) -> list[Path]:
    """The files of a run on this node: its copies, of all jobs, and the file that its processes lock."""
    return files_in_own_folders(f"{prefix(run)}*")


def _job() -> str:
    """The job of the batch system, as a part of a file's name."""
    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        if said := os.environ.get(variable):
            return f"job{re.sub(_NOT_IN_NAMES, '_', said)}"
    return "local"


def parts_of(tensors: Sequence[Local], *, whole: bool) -> tuple[list[CopyPart], list[np.ndarray], int]:
    """The places of a rank's boxes, their arrays, and the number of bytes. `whole`: also tensors that all ranks hold whole."""
    parts, arrays, at = [], [], 0
    for local in tensors:
        if local.description is None or (local.whole and not whole):
            continue
        for box, array in ((each.box, each.array) for each in local.boxes):
            its = local.description
            parts.append(CopyPart(local.name, its.dtype, its.shape, box.offset, box.shape, at))
            arrays.append(array)
            at += -(-array.nbytes // _ALIGN) * _ALIGN
    return parts, arrays, at


class CopyFile:
    """One file, open for writing. OSError if node memory is full."""

    def __init__(self, path: Path, nbytes: int, header_bytes: int) -> None:
        self._length = _DATA_AT + nbytes + header_bytes + _SPARE_BYTES
        self.path, fd = made_own(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, self._length)
            # The mapping holds the lock, by a descriptor of its own. It ends with the last reference to the bytes, also after a loss.
            self._bytes = np.frombuffer(mmap.mmap(fd, self._length), np.uint8)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def fits(self, nbytes: int, header_bytes: int) -> bool:
        """Whether a copy of this size fits into the file."""
        return _DATA_AT + nbytes + header_bytes <= self._length

    def begin(self) -> None:
        """Mark the contents as incomplete."""
        self._put(0, _WRITING)

    def data(self, nbytes: int) -> np.ndarray:
        """The bytes of the data, writable."""
        return self._bytes[_DATA_AT : _DATA_AT + nbytes]

    def finish(self, header: bytes, nbytes: int) -> None:
        """Write the header, then mark the contents as complete."""
        at = _DATA_AT + nbytes
        self._put(at, header)
        self._put(8, struct.pack("<QQ", at, len(header)))
        self._put(0, _COMPLETE)
        with suppress(OSError):  # somebody has removed the file, and the copy is lost with it
            os.utime(self.path)  # for `orphans`: a write to the mapping need not change it

    def close(self) -> None:
        """Release the lock. The file stays."""
        self._bytes = np.empty(0, np.uint8)

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _put(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)


class FoundCopy(NamedTuple):
    """A complete copy on this node."""

    path: Path
    header: bytes  # JSON of a Header


def complete_copies(run: str) -> Iterator[FoundCopy]:
    """The complete copies of a run on this node, of all epochs. Files of other users, and files that are no copies, are passed over."""
    for path in files_of(run):
        with suppress(OSError, msgspec.MsgspecError), open(path, "rb", opener=open_own) as file:
            head = file.read(24)
            if len(head) == 24 and head[:8] == _COMPLETE:
                at, length = struct.unpack("<QQ", head[8:])
                if at + length <= os.fstat(file.fileno()).st_size:
                    file.seek(at)
                    header = file.read(length)
                    msgspec.json.decode(header, type=Header)
                    yield FoundCopy(path, header)


def open_own(path: str | Path, flags: int, *, folder: int | None = None) -> int:
    """Open a regular file of this user, or make it for this user alone. PermissionError for another one. `folder`: that of `path`."""
    try:
        fd = open_regular(path, flags, 0o600, folder=folder)
    except OddFileError:
        raise PermissionError(errno.EPERM, "not a file of this user", path) from None
    if os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a file of this user", path)
    return fd


def made_own(path: Path) -> tuple[Path, int]:
    """Open a file of this user to write, and make it if there is none; returns its path, too.

    Another process may have removed the empty folder since. Then it is made again, or another one if a stranger has taken its name.
    """
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), opened(path.parent) as folder:
        return path, open_own(path.name, os.O_RDWR | os.O_CREAT, folder=folder)
    path = own_folder() / path.name
    with opened(path.parent) as folder:
        return path, open_own(path.name, os.O_RDWR | os.O_CREAT, folder=folder)


def open_data(path: Path) -> np.ndarray:
    """The data of a copy, as read-only bytes."""
    with open(path, "rb", opener=open_own) as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[_DATA_AT:]


def remove_copies(run: str, *, before_epoch: float = float("inf"), but: Container[str] = ()) -> None:
    """Remove a run's copies of earlier epochs from this node, without the files with the paths `but`."""
    for path, epoch in _epochs(run):
        if epoch < before_epoch and str(path) not in but:
            with suppress(FileNotFoundError, PermissionError, IsADirectoryError):
                path.unlink()
    tidy()


def newest_epoch(run: str) -> int:
    """The last epoch of which this node has copies of a run, also incomplete ones; 0 without copies."""
    return max((epoch for _, epoch in _epochs(run)), default=0)


def oldest_epoch(run: str) -> float:
    """The first epoch of which this node has copies of a run, also incomplete ones; infinity without copies."""
    return min((epoch for _, epoch in _epochs(run)), default=float("inf"))


def _epochs(run: str) -> Iterator[tuple[Path, int]]:
    """The files of a run's copies on this node, with their epochs."""
    for path in files_of(run):
        _, _, epoch = path.name.removeprefix(prefix(run)).partition("-")
        if (number := epoch.partition("-")[0]).isdigit():
            yield path, int(number)
