"""The way to a checkpoint's files: regular ones of its own folder, never a link, and no more memory than is on the disk.

What they say is checked in validation.py.
"""

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ckpt.format.manifest import FILE_NAME, MAX_BYTES, MAX_LINE_BYTES, CheckpointError, File, OutOfReachError
from ckpt.format.validation import Header, decode_header, out_of_reach, refused


def check_files(path: Path, files: tuple[File, ...]) -> None:
    """CheckpointError unless every file is there, a regular one, no other's twin, and of the size the manifest names."""
    seen: dict[tuple[int, int], str] = {}
    try:
        folder = open_folder(path)
    except OSError as error:
        raise OutOfReachError(f"the folder cannot be opened: {error.strerror}") from None
    try:
        for file in files:
            try:
                status = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError as error:
                raise CheckpointError(f"{file.name} is missing: {error.strerror}") from None
            except OSError as error:
                raise OutOfReachError(f"{file.name} cannot be looked at: {error.strerror}") from None
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{file.name} is no regular file: links and devices are not followed")
            if status.st_size != file.nbytes:
                raise CheckpointError(
                    f"{file.name} has {status.st_size} bytes instead of {file.nbytes}: it is truncated or altered"
                )
            # Otherwise one file on the disk could pose as any number of them.
            other = seen.setdefault((status.st_dev, status.st_ino), file.name)
            if other != file.name:
                raise CheckpointError(f"{file.name} is the same file as {other}")
    finally:
        os.close(folder)


def open_folder(path: Path) -> int:
    """A descriptor of a checkpoint's folder, which may be reached by links: inside of it there are none. OSError if there is none."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)


def open_regular(path: str | os.PathLike[str], folder: int | None = None) -> int:
    """A descriptor to read a regular file; OSError or CheckpointError for a link, and for a pipe instead of waiting for it.

    `folder`: a descriptor from `open_folder`, in which `path` is a plain name. Who exchanges the folder meanwhile leads nobody astray.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{os.path.basename(path)} is no regular file")
    return fd


def read_header(path: Path) -> tuple[Header, bytes]:
    """The header of the checkpoint `path`, and its line; CheckpointError, OSError."""
    with open(open_regular(path / FILE_NAME), "rb") as file:
        return header_in(file)


def read_bytes(path: Path) -> bytes:
    """The manifest of the checkpoint `path`, to be decoded. CheckpointError, OSError."""
    with open(open_regular(path / FILE_NAME), "rb") as file:
        return manifest_in(file, os.fstat(file.fileno()).st_size)


def manifest_in(file: BinaryIO, nbytes: int) -> bytes:
    """The manifest in a file that is read from its beginning and is so long. CheckpointError, OSError.

    The memory is that of what is on the disk: a hole in the file reads as zeros, where reading ends.
    """
    if nbytes > MAX_BYTES:
        raise out_of_reach(f"it has {nbytes} bytes, expected at most {MAX_BYTES}")
    data = io.BytesIO()
    data.write(header_in(file)[1])
    while piece := file.read(1 << 20):
        if b"\0" in piece:
            raise refused("it has zeros in it: it is altered, or was never written to the disk")
        data.write(piece)
    return data.getvalue()


def header_in(file: BinaryIO) -> tuple[Header, bytes]:
    """The header of the manifest in a file that is read from its beginning, and its line. CheckpointError, OSError."""
    line = file.readline(MAX_LINE_BYTES + 1)
    return decode_header(line), line
