"""What users should know of the data, in a line that comes once on each node of a job."""

import errno
import socket
import sys
from typing import NamedTuple

from collectives.texts import shown, without_secrets

_held = set[str]()


class Remark(NamedTuple):
    """A line. `once`: a text that all processes of the job have, and no other job: of several remarks with it the first one is printed,
    on each node. "": it is printed in any case."""

    text: str
    once: str = ""


def say_remark(remark: Remark) -> None:
    """Print a remark. A rank calls this, also for programs that it has started: what is printed once stays known until it ends."""
    if not remark.once or is_first(remark.once):
        print(f"data: {shown(without_secrets(remark.text))}", file=sys.stderr, flush=True)


def is_first(name: str) -> bool:
    """Whether no process of this node has asked with this name, until the one that was first ends; for a name that some process keeps,
    until that one ends. Only Linux has sockets with a name and no file; elsewhere True."""
    if name in _held:
        return False
    if (first := _is_first_of_kept(name)) is not None:
        return first
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # The kernel lets one process have a name, and forgets it when the process ends.
        held.bind(_address(name))
    except OSError as error:
        held.close()
        return error.errno != errno.EADDRINUSE
    held.detach()  # it stays open until this process ends
    _held.add(name)
    return True


def keep(name: str) -> socket.socket | None:
    """Keep a name for programs that this process starts, as long as the socket is open that this returns: they may end before others
    ask. None where there are no such sockets."""
    kept = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        kept.bind(_address(name))
        kept.listen(0)  # for one connection, which waits for ever: nobody accepts it
    except OSError:
        kept.close()
        return None
    return kept


def _is_first_of_kept(name: str) -> bool | None:
    """Whether this process is the first to connect to the one that keeps a name. None if nobody keeps it.

    A connection that nobody has accepted stays in the queue after its process has ended.
    """
    asks = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        asks.setblocking(False)
        asks.connect(_address(name))
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        asks.close()
    return True


def _address(name: str) -> str:
    return f"\0mpitrain-remark-{name}"
