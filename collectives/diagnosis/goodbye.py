"""The goodbye of a rank, which distinguishes a regular end from a death (`os._exit`, a signal, a crash).

The ranks of a node form a ring of sockets. The system closes the sockets of a process at its end, so the next rank detects every end at
once. A regular end first sends a byte, the goodbye. A death on another node is detected only by the deadline: see hangs/deadline.py.
"""

import os
import socket
from contextlib import suppress
from typing import Any
from uuid import uuid4

from collectives.diagnosis.job import keep

_BYTE = b"\0"

_to_next: socket.socket | None = None  # the socket for this process's goodbye


class Neighbour:
    """The rank before this one on its node. `mpi`: of all ranks. Collective."""

    def __init__(self, mpi: Any) -> None:
        from mpi4py import MPI

        self.rank = -1  # in the job; -1: there is no neighbour
        self._socket: socket.socket | None = None
        node = keep(mpi.Split_type(MPI.COMM_TYPE_SHARED))
        if node.size > 1:
            self._join(node, mpi.rank)
            os.register_at_fork(after_in_child=self._forked)
        node.Free()

    def _join(self, node: Any, rank: int) -> None:
        """Connect the ring. A rank may fail to reach the next one: containers of one node may have separate networks."""
        name = f"\0mpitrain-{os.getpid()}-{uuid4().hex}"  # an abstract name, so that no file remains
        with socket.socket(socket.AF_UNIX) as listener:
            with suppress(OSError):
                listener.bind(name)
                listener.listen(1)
            names = node.allgather(name)
            to_next = socket.socket(socket.AF_UNIX)
            reached = False
            with suppress(OSError):
                to_next.connect(names[(node.rank + 1) % node.size])
                reached = True
            before, can_hear = node.allgather((rank, reached))[node.rank - 1]
            if reached:
                _say_at(to_next)
            else:
                to_next.close()
            if can_hear:
                self._socket = listener.accept()[0]
                self._socket.setblocking(False)
                self.rank = before

    def fileno(self) -> int:
        """The file descriptor of the socket; -1 if there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def heard(self) -> bool | None:
        """The neighbour's end: True after a goodbye, False after a death, None while it runs. After one True or False always None."""
        if self._socket is None:
            return None
        try:
            said = bool(self._socket.recv(1))
        except BlockingIOError:
            return None
        except OSError:  # the connection was reset
            said = False
        self.close()
        return said

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _forked(self) -> None:
        """Close the sockets in a forked child: it must not keep its parent's sockets open or say goodbye for its parent."""
        self.close()
        if (end := _say_at(None)) is not None:
            end.close()


def say() -> None:
    """Say goodbye before the end of this process. Idempotent."""
    if (end := _say_at(None)) is not None:
        with suppress(OSError):  # the next rank has ended
            end.send(_BYTE)
        end.close()  # the next rank still receives the byte


def hang_up() -> None:
    """Close this process's socket without a goodbye, before it joins another ring."""
    if (end := _say_at(None)) is not None:
        end.close()


def _say_at(end: socket.socket | None) -> socket.socket | None:
    """Use `end` for this process's goodbye. Returns the socket used before."""
    global _to_next
    before, _to_next = _to_next, end
    return before
