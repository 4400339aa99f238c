"""The goodbye of a rank, which distinguishes an end from a death (`os._exit`, a signal, a crash).

The ranks of a node form a ring of sockets. The system closes the sockets of a process at its end, so the next rank notices every end at
once. A byte before that is the goodbye. Ranks of other nodes are noticed by their silence, see hangs/deadline.py.
"""

import os
import socket
from contextlib import suppress
from typing import Any
from uuid import uuid4

_BYTE = b"\0"

_to_next: socket.socket | None = None  # where this process says goodbye


class Neighbour:
    """The rank before this one on its node. `mpi`: all ranks. Collective."""

    def __init__(self, mpi: Any) -> None:
        from mpi4py import MPI

        self.rank = -1  # in the job; -1: there is no such rank
        self._socket: socket.socket | None = None
        node = mpi.Split_type(MPI.COMM_TYPE_SHARED)
        if node.size > 1:
            self._join(node, mpi.rank)
            os.register_at_fork(after_in_child=self._forked)
        node.Free()

    def _join(self, node: Any, rank: int) -> None:
        """Make the ring, where each rank reaches its next one: ranks of one node may still have networks of their own."""
        name = f"\0mpitrain-{os.getpid()}-{uuid4().hex}"  # in no folder, so that nothing is left behind
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
        """The descriptor to wait at; -1 if there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def heard(self) -> bool | None:
        """Its end: True for a goodbye, False where its process is gone without one. None while it runs. Said once."""
        if self._socket is None:
            return None
        try:
            said = bool(self._socket.recv(1))
        except BlockingIOError:
            return None
        except OSError:  # this rank's own goodbye has not been read
            said = False
        self.close()
        return said

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _forked(self) -> None:
        """A child does not hold its parent's sockets open, and says no goodbye in its parent's place."""
        self.close()
        if (end := _say_at(None)) is not None:
            end.close()


def say() -> None:
    """Say goodbye: this process is about to end, and that is no death. Idempotent."""
    if (end := _say_at(None)) is not None:
        with suppress(OSError):  # the next rank has ended before
            end.send(_BYTE)
        end.close()  # the next rank still receives the byte


def _say_at(end: socket.socket | None) -> socket.socket | None:
    """From now on this process says goodbye at `end`; returns where it did so far."""
    global _to_next
    before, _to_next = _to_next, end
    return before
