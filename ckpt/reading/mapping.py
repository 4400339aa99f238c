"""Datasets of any HDF5 file as arrays in mapped memory. A child process opens the files, because HDF5 may crash: see vectors.py."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ckpt.storage.child import ALONE, MORE_MEMORY, environment, explained, signal_name
from ckpt.storage.local_path import open_given
from collectives.processes import helpers_start
from collectives.programs import import_paths

_MAX_MESSAGE_BYTES = 1 << 16
# With -I Python ignores the environment, and imports nothing from the current folder.
_CHILD = """
import json, runpy, sys
sys.path[:] = json.loads(sys.argv[3])
runpy.run_path(sys.argv[4], run_name="__main__")
"""


def map_vector(path: str | os.PathLike[str], name: str | None = None) -> np.ndarray:
    """A 1-D dataset of integers in an HDF5 file, memory-mapped and read-only. The file is not kept open.

    Args:
        path: the file.
        name: the dataset; None: "tokens", or the only 1-D dataset of integers at the top of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no HDF5 file, or damaged; there is no such dataset; or its values are no range of bytes of this file: it is
            compressed, chunked or virtual, or lies in another file.
    """
    with VectorFiles() as files:
        return files.map(path, name)


class VectorFiles:
    """Maps datasets of many files: see `map_vector`. A context manager: its end ends the child process, which the first file starts."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> "VectorFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def map(self, path: str | os.PathLike[str], name: str | None = None) -> np.ndarray:
        """See `map_vector`."""
        path = Path(path)
        with os.fdopen(open_given(path), "rb") as file:
            found = self._ask(file.fileno(), name)
            if isinstance(found, str):
                raise ValueError(f"{path}: {explained(found)}")
            offset, dtype, length = found["offset"], np.dtype(found["dtype"]), found["length"]
            if offset + length * dtype.itemsize > os.fstat(file.fileno()).st_size:
                raise ValueError(f"{path}: it is cut off: its dataset ends at byte {offset + length * dtype.itemsize}")
            return np.memmap(file, dtype, "r", offset, (length,))

    def _ask(self, file: int, name: str | None) -> dict[str, Any] | str:
        """Where the dataset is, or what is wrong with the file."""
        if self._socket is None:
            self._start()
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [json.dumps(name).encode()], [file])
            answer = self._socket.recv(_MAX_MESSAGE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        if answer:
            found: dict[str, Any] | str = json.loads(answer)
            return found
        code = self._end()
        if code == 1:  # Python's own errors, such as a module that is missing
            raise OSError("the process that opens HDF5 files cannot start; expected `python -c 'import h5py'` to work")
        return (
            f"HDF5 crashes on it, does not end, or needs more than {MORE_MEMORY >> 20} MiB of memory: {signal_name(-code)}; the file "
            f"is damaged, or has too much in it: {ALONE}"
        )

    def _start(self) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Path(__file__).with_name("vectors.py")
        with its, helpers_start():
            words = [str(its.fileno()), str(MORE_MEMORY)]
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", _CHILD, *words, json.dumps(import_paths()), str(program)],
                stdin=subprocess.DEVNULL,
                env=environment(),
                pass_fds=[its.fileno()],
            )

    def _end(self) -> int:
        """End the child. Returns its exit code."""
        if self._socket is not None:
            self._socket.close()
        code = self._child.wait() if self._child is not None else 0
        self._socket = self._child = None
        return code
