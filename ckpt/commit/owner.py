"""The owner of an unfinished folder: the process that fills it signs a file there, so that other processes can check that it lives.

A process may fill several folders at the same time, one per thread: each folder has its own token.
"""

import os
import socket
import time
import uuid
from pathlib import Path

import msgspec

from ckpt.format.manifest import CheckpointError
from ckpt.storage.catalog import OWNER_NAME
from ckpt.storage.local_path import open_regular
from collectives.processes import stat_fields

_MAX_BYTES = 1 << 16  # of a signature
_tokens: set[str] = set()  # the tokens of the folders that this process is filling


def new_token() -> str:
    """A token for a folder that this process begins to fill; call `forget_token` at the end."""
    token = uuid.uuid4().hex
    _tokens.add(token)
    return token


def forget_token(token: str) -> None:
    """End a token: its folder is complete, or given up."""
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
    """The owner of the folder `stage`; None if no owner has signed, or the signature cannot be read, such as a stranger's pipe."""
    try:
        with open(open_regular(stage / OWNER_NAME), "rb", buffering=0) as file:
            return owner_of(file.read(_MAX_BYTES))
    except (OSError, CheckpointError):
        return None


def signature(token: str, *, place: str = "", job: str | None = None) -> bytes:
    """The bytes of the file that names this process as the owner. `owner_of` parses them."""
    pid = os.getpid()
    return msgspec.json.encode(FolderOwner(socket.gethostname(), pid, start_time(pid), token, time.time(), place, job))


def owner_of(data: bytes) -> FolderOwner | None:
    """The owner in a signature; None if it cannot be read."""
    try:
        return _OWNER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_alive(owner: FolderOwner) -> bool:
    """Whether the owner runs on this host. If it is this process: whether the token is in use, as an own failed save counts as dead.

    The start time is compared, too, because another process may have the pid by now.
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
    """The kernel's start time of a process of this host; None if there is no such process, or only a zombie."""
    fields = stat_fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else None
