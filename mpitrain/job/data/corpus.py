"""The training data: the files, their order, and the split into train and held-out.

The default corpus is the source code of Python's standard library: real text that every machine with Python has. Folders
named `test`, `tests` and `idle_test` are left out, because Linux distributions ship Python without them.

A token is a byte of a file. Each file is followed by one zero byte, which text does not contain, so that a model sees the end
of the file. `scan` only lists the files. `read_into` reads them into memory of the caller, so that one rank per node can fill
an array that all ranks of the node see.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.job.data.folders import TextFile, files_of, json_remark

SEPARATOR = 0
"""The token after each file."""

MIN_FILES_TO_HASH = 20
"""With fewer files, the split cuts off the last part of all bytes: a split by whole files would be far from the wanted share."""

_STDLIB = sysconfig.get_paths()["stdlib"]
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class FilePiece(NamedTuple):
    """A run of bytes of one file."""

    name: str
    """The name for order, split and fingerprint: the path relative to the folder in the argument."""
    path: Path
    """The path of the file on this machine."""
    file_bytes: int
    """Size of the whole file when it was listed."""
    begin: int
    """First byte taken."""
    end: int
    """Byte after the last one taken."""
    real: str = ""
    """The path of the file without links."""
    split_name: str = ""
    """The name that decides the side of the split. All names of one file have the same, so that no bytes are on both sides."""


@dataclass(frozen=True)
class Part:
    """One side of the split: pieces of files in order. When read, a separator follows each piece."""

    pieces: tuple[FilePiece, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that `read_into` writes: the pieces' bytes and one separator after each."""
        return sum(piece.end - piece.begin + 1 for piece in self.pieces)


@dataclass(frozen=True)
class Listing:
    """A corpus that was not read yet: its files, and their split."""

    train: Part
    heldout: Part
    fingerprint: str
    """Hash of the files' names and sizes and of the split. A checkpoint stores it, so a change of the data is noticed."""
    remarks: tuple[str, ...] = ()
    """Lines for users about files that are left out, or read as text although they may be something else."""


def scan(
    paths: Sequence[str],
    suffixes: Sequence[str] = (),
    heldout: float = 0.05,
    *,
    follow_links: bool = False,
    field: str | None = None,
) -> Listing:
    """List a corpus and split it. The function reads names and sizes, and the first 4 KiB of files.

    The hash of a file's name decides its side of the split, so other files that are added or removed do not move it. A link is on the
    side of its file. With fewer than `MIN_FILES_TO_HASH` files, the held-out side is the last part of all the bytes laid end to end.

    Args:
        paths: files and folders; empty: the standard library. A folder stands for all files below it, except hidden files
            and folders and `__pycache__`; links to folders are not followed. A file in `paths` is always taken.
        suffixes: the endings of the files that are taken from folders, such as (".py", ".md"). Empty: all files that look
            like text (no zero byte in the first 4 KiB); of the standard library `.py`.
        heldout: the held-out share of the data, 0 up to, but not including, 1.
        follow_links: whether files in folders may be links that lead out of the folder (see folders.py).
        field: by which JSON Lines are known as documents; None: "text".

    Raises:
        ValueError: a path that is missing or not readable, nothing found, a share out of range, links that lead out of a folder, a file
            of another format, or a folder of shards of documents.
    """
    if not 0 <= heldout < 1:
        raise ValueError(f"data.heldout: expected at least 0 and less than 1, got {heldout}")
    remarks: list[str] = []
    files = _list_files(paths, suffixes, follow_links, field or "text", remarks)
    if not files:
        where = ", ".join(paths) or _STDLIB
        wanted = f"files ending in {', '.join(suffixes)}" if suffixes else "text files"
        raise ValueError(
            "; ".join([f"data.path: expected {wanted} that are not empty, found none in {where}", *remarks])
        )
    digest = hashlib.blake2b(f"{heldout!r}".encode(), digest_size=16)
    for file in files:
        of_file = f"\0{file.split_name}" if file.split_name != file.name else ""
        digest.update(f"{file.name}\0{file.file_bytes}{of_file}\0".encode(errors="surrogateescape"))
    if len(files) < MIN_FILES_TO_HASH:
        train, held = _split_tail(files, heldout)
    else:
        held = [file for file in files if _share(file.split_name) < heldout]
        train = [file for file in files if _share(file.split_name) >= heldout]
    return Listing(Part(tuple(train)), Part(tuple(held)), digest.hexdigest(), tuple(remarks))


def read_into(part: Part, buffer: np.ndarray) -> None:
    """Read one side of a listing.

    Args:
        part: `listing.train` or `listing.heldout`.
        buffer: 1-D uint8 array of exactly `part.num_tokens`, filled in place.

    Raises:
        ValueError: a buffer of another shape or dtype, or a file that changed after it was listed.
    """
    if buffer.dtype != np.uint8 or buffer.shape != (part.num_tokens,) or not buffer.flags.c_contiguous:
        got = f"{buffer.dtype} of shape {buffer.shape}, strides {buffer.strides}"
        raise ValueError(f"buffer: expected contiguous uint8 of shape ({part.num_tokens},), got {got}")
    at = 0
    for piece in part.pieces:
        count = piece.end - piece.begin
        try:
            with open(piece.path, "rb") as file:
                if os.fstat(file.fileno()).st_size != piece.file_bytes:
                    raise ValueError(f"{piece.path} changed its size while it was read; start again when it is at rest")
                file.seek(piece.begin)
                num_read = file.readinto(buffer[at : at + count].data)
        except OSError as error:
            raise ValueError(f"{piece.path} cannot be read: {error.strerror or error}") from error
        if num_read != count:
            raise ValueError(f"{piece.path} ended after {num_read} of {count} bytes; start again when it is at rest")
        buffer[at + count] = SEPARATOR
        at += count + 1


def _list_files(
    paths: Sequence[str], suffixes: Sequence[str], follow_links: bool, field: str, remarks: list[str]
) -> list[FilePiece]:
    """The files of the corpus, whole, in the order of `paths`, within a folder by name. Empty files are dropped."""
    default = not paths
    files: dict[str, FilePiece] = {}
    of_json: dict[str, Path] = {}
    for given in paths or (_STDLIB,):
        root = Path(given).expanduser()
        _check_there(root)
        if root.is_dir():
            wanted = tuple(suffixes) or ((".py",) if default else ())
            skipped = _STDLIB_SKIPPED if default else frozenset()
            found = files_of(
                root,
                wanted,
                skipped=skipped,
                follow_links=follow_links or default,
                field=field,
                say=remarks.append,
            )
        else:
            found = [TextFile(root.name, root, root.stat().st_size).looked_into()]
        for name, path, size, is_json in found:
            if not os.access(path, os.R_OK):
                raise ValueError(f"data.path: {path} cannot be read: permission denied")
            if size:  # a name that two of the paths reach counts once; a link is another name
                full = os.path.join(os.path.realpath(path.parent), path.name)
                real = os.path.realpath(full) if os.path.islink(full) else full
                key = real if default else full  # Pythons differ in their links
                files.setdefault(key, FilePiece(name, path, size, 0, size, real))
                of_json |= {key: path} if is_json else {}
    json_bytes = sum(files[key].file_bytes for key in of_json)
    if 2 * json_bytes > sum(file.file_bytes for file in files.values()):  # settings in JSON are beside most programs
        remarks.append(json_remark(list(of_json.values())))
    name_of: dict[str, str] = {}  # of each real file: its own name, or else that of the first link to it
    for file in files.values():
        name_of.setdefault(file.real, files.get(file.real, file).name)
    return [file._replace(split_name=name_of[file.real]) for file in files.values()]


def _check_there(path: Path) -> None:
    try:
        if not path.exists():
            raise ValueError(f"data.path: {path} does not exist")
    except OSError as error:
        raise ValueError(f"data.path: {path} cannot be read: {error.strerror or error}") from error
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"data.path: {path} is neither a file nor a folder")


def _share(name: str) -> float:
    return share_of(name.encode(errors="surrogateescape"))


def share_of(key: bytes) -> float:
    """A number in [0, 1) that depends on a key alone, for the split: of a file of text, or of a document."""
    digest = hashlib.blake2b(key, digest_size=8, person=b"mpitrain.split").digest()
    return int.from_bytes(digest, "big") / 2**64


def _split_tail(files: list[FilePiece], heldout: float) -> tuple[list[FilePiece], list[FilePiece]]:
    """Cut all bytes laid end to end once: the first part trains, the rest is held out. All names of a file have the same cut."""
    num_bytes = {file.real: file.file_bytes for file in files}
    num_train = round(sum(num_bytes.values()) * (1 - heldout))
    cuts: dict[str, int] = {}
    for real, size in num_bytes.items():
        cuts[real] = min(max(num_train, 0), size)
        num_train -= size
    train = [file._replace(end=cuts[file.real]) for file in files if cuts[file.real]]
    held = [file._replace(begin=cuts[file.real]) for file in files if cuts[file.real] < file.file_bytes]
    return train, held
