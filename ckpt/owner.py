"""Who is filling a folder: a process of some host says so in a file there, so that others know whether it lives."""

import json
import os
import socket
import time
from pathlib import Path

from ckpt.folder import OWNER_NAME


def owner_in(stage: Path) -> dict | None:
    """Who is filling the folder `stage`; None if that is not said, or cannot be read."""
    try:
        return owner_of((stage / OWNER_NAME).read_bytes())
    except OSError:
        return None


def signature(token: str) -> bytes:
    """What a stage says of who is filling it: `owner_of` reads it."""
    pid = os.getpid()
    owner = {"host": socket.gethostname(), "pid": pid, "start": start_time(pid), "token": token, "begun": time.time()}
    return json.dumps(owner).encode()


def owner_of(data: bytes) -> dict | None:
    """Who signed; None if that cannot be read."""
    try:
        owner = json.loads(data)
        return owner if {"host", "pid", "start", "token"} <= owner.keys() else None
    except (ValueError, AttributeError):
        return None


def is_alive(owner: dict) -> bool:
    """Whether a stage's process runs on this host: the number alone may belong to another one by now."""
    return (
        owner["host"] == socket.gethostname()
        and owner["start"] is not None
        and start_time(owner["pid"]) == owner["start"]
    )


def start_time(pid: int) -> str | None:
    """When a process of this host began, in the kernel's words; None if there is none."""
    try:
        # The process's name, in parentheses, may hold spaces: count from behind it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
