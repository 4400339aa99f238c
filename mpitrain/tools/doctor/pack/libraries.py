"""Where a shared library looks for others: the run path in its ELF file, changed in place for another folder."""

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
"""Of 64 bits, little-endian."""
_LOAD, _DYNAMIC = 1, 2
_END, _STRINGS, _RPATH, _RUNPATH = 0, 5, 15, 29


def with_run_path(path: Path, change: Callable[[list[str]], list[str]]) -> bytes | None:
    """The bytes of the library with other folders in its run path.

    Args:
        path: any file.
        change: from the folders to those that shall stand there.

    Returns: None if the file is no library with a run path, if nothing changes, or if the new one is longer than the old one.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC or os.fstat(file.fileno()).st_size < 64:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                places = _run_paths(data)
            except (struct.error, IndexError):
                return None
            changed = None
            for place in places:
                old = data[place : data.find(b"\0", place)]
                new = ":".join(change(os.fsdecode(old).split(":"))).encode()
                if new != old and len(new) <= len(old):
                    changed = changed or bytearray(data)
                    changed[place : place + len(old)] = new.ljust(len(old), b"\0")
            return None if changed is None else bytes(changed)


def _run_paths(data: mmap.mmap) -> list[int]:
    """The offsets of the run paths: RPATH and RUNPATH of the dynamic segment."""
    (headers,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQ", data, headers + i * size) for i in range(count)]
    dynamic = [(offset, length) for kind, _, offset, _, _, length in segments if kind == _DYNAMIC]
    if not dynamic:
        return []
    start, length = dynamic[0]
    values: dict[int, int] = {}
    for place in range(start, start + length, 16):
        tag, value = struct.unpack_from("<qQ", data, place)
        if tag == _END:
            break
        values[tag] = value
    strings = values.get(_STRINGS)
    for kind, _, offset, address, _, length in segments:
        if strings is not None and kind == _LOAD and address <= strings < address + length:
            return [strings - address + offset + values[tag] for tag in (_RPATH, _RUNPATH) if tag in values]
    return []
