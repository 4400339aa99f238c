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
    """Whether no process of this node has asked with this name. Only Linux has sockets with a name and no file; elsewhere True."""
    if name in _held:
        return False
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # The kernel lets one process have a name, and forgets it when the process ends.
        held.bind(f"\0mpitrain-remark-{name}")
    except OSError as error:
        held.close()
        return error.errno != errno.EADDRINUSE
    held.detach()  # it stays open until this process ends
    _held.add(name)
    return True
