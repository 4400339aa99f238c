"""The file of a pack: a head in bash, then a tar. The head knows the tar's SHA-256."""

import hashlib
import io
import os
import platform
import shlex
import tarfile
import time
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mpitrain.tools.doctor.pack.compiled import compiled, compiled_name
from mpitrain.tools.doctor.pack.contents import Entry, PackLayout

HEADER_BYTES = 64 * 1024
_MARK = "# MPITRAIN_PACK_VALUES\n"
_PAGE_BYTES = 4096


class PackSize(NamedTuple):
    """`num_files`, with compiled ones; `packed`: bytes of the file; `unpacked`: bytes of a node's memory."""

    num_files: int
    packed: int
    unpacked: int


class _Hashing(io.RawIOBase):
    """Hashes what goes into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.sha256.update(data)
        self.num_bytes += len(data)
        return self.file.write(data)


def write(
    target: Path, entries: Iterable[Entry], found: PackLayout, *, was: str, about: str, tell: Callable[[int], None]
) -> PackSize:
    """Write a pack. It has the name `target` when it is whole: an earlier one stays until then.

    Args:
        was: the folder in which the environment lies now.
        about: what `show` prints.
        tell: is called with the number of files so far.
    """
    began_s = time.time()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            file.write(b"\n" * HEADER_BYTES)
            hashing = _Hashing(file)
            with tarfile.open(fileobj=hashing, mode="w|", bufsize=1 << 20, format=tarfile.GNU_FORMAT) as tar:
                num_files, unpacked = _add_all(tar, entries, tell)
            values = {
                "header": HEADER_BYTES,
                "payload": hashing.num_bytes,
                "unpacked": unpacked,
                "checksum": hashing.sha256.hexdigest(),
                "machine": platform.machine(),
                "packed_at": f"{began_s:.6f}",
                "prefix": found.prefix,
                "libraries": found.libraries,
                "own_mpi": int(found.own_mpi),
                "was": was,
                "about": about,
            }
            file.seek(0)
            file.write(_head(values, {"paths": found.paths}))
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o755 & ~_umask())
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return PackSize(num_files, HEADER_BYTES + hashing.num_bytes, unpacked)


def _head(values: dict[str, object], lists: dict[str, list[str]]) -> bytes:
    lines = [f"{name}={shlex.quote(str(value))}\n" for name, value in values.items()]
    lines += [f"{name}=({' '.join(map(shlex.quote, words))})\n" for name, words in lists.items()]
    script = resources.files("mpitrain.tools.doctor.pack").joinpath("start.sh").read_text()
    assert script.count(_MARK) == 1
    head = script.replace(_MARK, "".join(lines)).encode()
    if len(head) > HEADER_BYTES:
        raise ValueError(f"the paths of the environment take {len(head)} bytes; a pack has room for {HEADER_BYTES}")
    return head


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _add_all(tar: tarfile.TarFile, entries: Iterable[Entry], tell: Callable[[int], None]) -> tuple[int, int]:
    """Add all; returns the number of files and the bytes that they take in memory."""
    num_files = unpacked = 0
    for entry in entries:
        for info, data in _members(tar, entry):
            tar.addfile(info, data)
            if data is not None:
                data.close()
            num_files += 1
            unpacked += _PAGE_BYTES + -(-info.size // _PAGE_BYTES) * _PAGE_BYTES  # a page for the name and so on
            if num_files % 1000 == 0:
                tell(num_files)
    return num_files, unpacked


def _members(tar: tarfile.TarFile, entry: Entry) -> list[tuple[tarfile.TarInfo, BinaryIO | None]]:
    """The file, and its compiled code."""
    if entry.link is not None:
        link = tarfile.TarInfo(entry.name)
        link.type, link.linkname = tarfile.SYMTYPE, entry.link
        return [(link, None)]
    if entry.text is not None:
        status = entry.path.stat() if entry.path.is_file() else None
        mode, mtime = (status.st_mode & 0o755, status.st_mtime) if status else (0o644, 0.0)
        return [_file(entry.name, entry.text, mode, mtime)]
    status = entry.path.stat()
    if not entry.name.endswith(".py"):
        info = tarfile.TarInfo(entry.name)
        info.size, info.mode, info.mtime = status.st_size, status.st_mode & 0o755 | 0o600, int(status.st_mtime)
        return [(info, entry.path.open("rb"))]
    source = entry.path.read_bytes()
    members = [_file(entry.name, source, status.st_mode & 0o755 | 0o600, status.st_mtime)]
    if (code := compiled(entry.path, source)) is not None:
        members.append(_file(compiled_name(entry.name), code, 0o644, status.st_mtime))
    return members


def _file(name: str, data: bytes, mode: int, mtime: float) -> tuple[tarfile.TarInfo, BinaryIO | None]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), mode, int(mtime)
    return info, io.BytesIO(data)
