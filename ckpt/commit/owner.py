"""The owner of a folder in the making: a process signs a file there, so that other processes can tell whether it lives.

A process may fill several folders at the same time, one a thread: each has a token of its own.
"""

import os
import socket
import time
import uuid
from pathlib import Path

import msgspec

from ckpt.storage.catalog import OWNER_NAME

_tokens: set[str] = set()  # of the folders that this process is filling


def new_token() -> str:
    """A token for a folder that this process begins to fill; `forget_token` when it has ended."""
    token = uuid.uuid4().hex
    _tokens.add(token)
    return token


def forget_token(token: str) -> None:
    """The folder of this token is filled, or given up."""
    _tokens.discard(token)


class FolderOwner(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process that fills a folder. `start`: its `start_time`; `begun`: the time of the signature, in seconds since the epoch.

    `place` and `job` are for a lock (mpitrain's folder_lock.py).
    """

    host: str
    pid: int
    start: str | None
    token: str
    begun: float | None = None
    place: str = ""
    job: str | None = None


_OWNER = msgspec.json.Decoder(FolderOwner)


def owner_in(stage: Path) -> FolderOwner | None:
    """The owner of the folder `stage`; None if no owner has signed, or the signature cannot be read."""
    try:
        return owner_of((stage / OWNER_NAME).read_bytes())
    except OSError:
        return None


def signature(token: str, *, place: str = "", job: str | None = None) -> bytes:
    """The bytes of the file that names this process as the owner: `owner_of` reads them."""
    pid = os.getpid()
    return msgspec.json.encode(FolderOwner(socket.gethostname(), pid, start_time(pid), token, time.time(), place, job))


def owner_of(data: bytes) -> FolderOwner | None:
    """The owner in a signature; None if it cannot be read."""
    try:
        return _OWNER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_alive(owner: FolderOwner) -> bool:
    """Whether a stage's process runs on this host, and this process is at work on it: what a save of its own could not clear is dead.

    The number of a process alone may belong to another one by now.
    """
    return (
        owner.host == socket.gethostname()
        and owner.start is not None
        and start_time(owner.pid) == owner.start
        and (owner.pid != os.getpid() or owner.token in _tokens)
    )


def refusal(pid: int) -> str:
    """The message for a second writer of a folder that the living process `pid` fills."""
    if pid == os.getpid():
        return "another thread of this process is writing this checkpoint"
    return f"process {pid} is writing this checkpoint; ranks that save one together pass comm=collectives.world()"


def start_time(pid: int) -> str | None:
    """When a process of this host began, in the kernel's words; None if there is none, or one that has ended and is a zombie."""
    try:
        # The process's name, in parentheses, may hold spaces: count from behind it.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except (OSError, IndexError):
        return None
