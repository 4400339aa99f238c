"""The program that finds vectors in HDF5 files for mapping.py, in a process of its own: HDF5 may crash on a damaged file, or never end.

A message to it is JSON with the name of a dataset or null, and comes with the descriptor of an open file. The answer is JSON: a dict
with `offset`, `length` and `dtype`, or a text that says what is wrong. The program ends with the socket. Its arguments are the socket,
and the bytes of memory that it may take when it has begun.

It imports h5py alone, and not the package, so that it starts in a tenth of a second.
"""

import json
import os
import resource
import signal
import socket
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import h5py

_CPU_S = 10.0  # for a file
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_LINKS = 16  # that lead from one to the next; HDF5 has the same limit
_MAX_MEMBERS = 10_000  # that are looked at
_MAX_NAMES = 20  # in one message


class _NotMappedError(Exception):
    """The text says what of a file cannot be mapped, or is not there."""


def main() -> None:
    """Answer messages."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + int(sys.argv[2])
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(kind, (limit, limit))
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        while True:
            message, files, _, _ = socket.recv_fds(parent, _MAX_MESSAGE_BYTES, 1)
            if not message:
                return
            signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # SIGPROF ends the process
            answer = _answer(files[0], json.loads(message))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            parent.send(json.dumps(answer).encode())


def _answer(file: int, name: str | None) -> dict[str, Any] | str:
    try:
        return _find(file, name)
    except _NotMappedError as error:
        return str(error)
    except Exception as error:  # HDF5 raises errors of many classes
        return f"HDF5 cannot read it: {(str(error) or type(error).__name__)[:200]!r}"
    finally:
        os.close(file)


def _find(file: int, name: str | None) -> dict[str, Any]:
    """Where a 1-D dataset of integers lies in the open file `file`. `name`: see map_vector."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_sec2()
    access.set_file_locking(False, True)  # a lock fails on some network file systems
    # By its descriptor: the caller maps the same file.
    opened = h5py.h5f.open(f"/proc/self/fd/{file}".encode(), h5py.h5f.ACC_RDONLY, fapl=access)
    root = h5py.h5g.open(opened, b"/")
    wanted = name if name is not None else "tokens" if root.links.exists(b"tokens") else _only_vector(root)
    found = _opened(root, wanted)
    if not _is_vector(found):
        raise _NotMappedError(_expected(wanted, _vectors(root), found))
    if problem := _why_not(found):
        raise _NotMappedError(
            f"{wanted!r} {problem}, and only contiguous datasets can be mapped: h5repack -l {wanted}:CONTI -f {wanted}:NONE FILE new.h5"
        )
    (length,) = found.get_space().get_simple_extent_dims()
    if not length:
        raise _NotMappedError(f"{wanted!r} is empty")
    if (offset := found.get_offset()) is None:
        raise _NotMappedError(f"{wanted!r} has {length} values, of which none was ever written")
    if not _is_plain(found.get_type()):
        raise _NotMappedError(f"{wanted!r} has integers that do not fill their bytes, which cannot be mapped")
    return {"offset": int(offset), "length": int(length), "dtype": found.get_type().dtype.str}


def _only_vector(root: h5py.h5g.GroupID) -> str:
    """The name of the only 1-D dataset of integers at the top of a file. A link to another file may be one, too."""
    vectors = _vectors(root)
    links = [key for key in _members(root) if root.links.get_info(key).type == h5py.h5l.TYPE_EXTERNAL]
    if len(names := [*vectors, *map(_text, links)]) != 1:
        raise _NotMappedError(_expected("tokens", vectors))
    return names[0]


def _vectors(root: h5py.h5g.GroupID) -> list[str]:
    """The names of the 1-D datasets of integers at the top of a file."""
    names = []
    for key in map(_text, _members(root)):
        try:
            if _is_vector(_opened(root, key)):
                names.append(key)
        except _NotMappedError:
            continue
    return names


def _expected(wanted: str, vectors: list[str], found: object = None) -> str:
    """A message. `found`: what has the wanted name; None if nothing has."""
    listed = ", ".join(vectors[:_MAX_NAMES]) + ", ..." * (len(vectors) > _MAX_NAMES)
    got = listed or "none" if found is None else _what(found) + f"; there is also {listed}" * bool(listed)
    return f"expected a 1-D dataset of integers named {wanted!r}, got {got}"


def _what(found: object) -> str:
    """Of an object, or a type and shape: "float32 of shape (3,)"."""
    if not isinstance(found, h5py.h5d.DatasetID):
        return "a group" if isinstance(found, h5py.h5g.GroupID) else "no dataset"
    dtype = _dtype(found.get_type())
    kind = "a type that NumPy does not have" if dtype is None else str(dtype)[:100]
    is_array = found.get_space().get_simple_extent_type() == h5py.h5s.SIMPLE
    return (
        f"{kind} of shape {tuple(map(int, found.get_space().get_simple_extent_dims()))}" if is_array else f"one {kind}"
    )


def _members(root: h5py.h5g.GroupID) -> list[bytes]:
    return list(islice(root, _MAX_MEMBERS))


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


def _opened(root: h5py.h5g.GroupID, path: str) -> Any:
    """The object with a path; None if there is none. _NotMappedError if a link leads to another file, or to itself."""
    at, parts, num_links = root, path.split("/"), 0
    while parts:
        key = parts.pop(0).encode(errors="surrogateescape")
        if key in (b"", b"."):
            continue
        if not isinstance(at, h5py.h5g.GroupID) or not at.links.exists(key):
            return None
        kind = at.links.get_info(key).type
        if kind == h5py.h5l.TYPE_HARD:
            at = h5py.h5o.open(at, key)
        elif kind == h5py.h5l.TYPE_SOFT:
            num_links += 1
            if num_links > _MAX_LINKS:
                raise _NotMappedError(f"{path!r} leads through more than {_MAX_LINKS} soft links, or to itself")
            target = _text(at.links.get_val(key))
            at = root if target.startswith("/") else at
            parts = target.split("/") + parts
        elif kind == h5py.h5l.TYPE_EXTERNAL:
            other = _text(at.links.get_val(key)[0])[:200]
            raise _NotMappedError(
                f"{path!r} is a link to another file, {other!r}; expected the values in this file: name that file instead"
            )
        else:
            raise _NotMappedError(f"{path!r} is a link of an unknown kind")
    return at


def _is_vector(found: object) -> bool:
    if not isinstance(found, h5py.h5d.DatasetID):
        return False
    space, kind = found.get_space(), found.get_type()
    is_line = space.get_simple_extent_type() == h5py.h5s.SIMPLE and space.get_simple_extent_ndims() == 1
    if not is_line or kind.get_class() not in (h5py.h5t.INTEGER, h5py.h5t.ENUM):
        return False
    dtype = _dtype(kind)
    return dtype is not None and dtype.kind in "iu"


def _dtype(kind: h5py.h5t.TypeID) -> Any:
    """The dtype of NumPy; None for a type that NumPy does not have, such as integers of 24 and floats of 256 bits."""
    try:
        return kind.dtype
    except (TypeError, ValueError):
        return None


def _is_plain(kind: h5py.h5t.TypeID) -> bool:
    """Whether the integers have all bits of their bytes."""
    if kind.get_class() == h5py.h5t.ENUM:
        kind = kind.get_super()
    size = int(kind.get_size())
    return (kind.get_precision(), kind.get_offset()) == (8 * size, 0) and kind.dtype.itemsize == size


def _why_not(dataset: h5py.h5d.DatasetID) -> str:
    """Why the values of a dataset are no range of bytes of its file; "" if they are."""
    plist = dataset.get_create_plist()
    layout = plist.get_layout()
    if layout == h5py.h5d.VIRTUAL:
        return "is virtual: it shows values of other datasets"
    if plist.get_external_count():
        return f"keeps its values in another file, {_text(plist.get_external(0)[0])[:200]!r}"
    if layout == h5py.h5d.CHUNKED:
        return "is chunked"
    return "" if layout == h5py.h5d.CONTIGUOUS else "is compact: its values are in its header"


if __name__ == "__main__":
    main()
