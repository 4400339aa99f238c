"""The goodbye of a rank, which distinguishes a regular end from a death (`os._exit`, a signal, a crash).

All ranks form a ring of sockets, ordered by node. The system closes the sockets of a process at its end, so both neighbours detect
every end at once, also on another host. A regular end first sends a byte, the goodbye. A rank that ends the job sends another byte,
which goes around the ring: all ranks end, even if the launcher does not end them. The loss of a host, or of its link, is detected by
the keepalive of the sockets between nodes (links.py). If two neighbours cannot connect, the deadline detects the death of either.
"""

import os
import socket
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from collectives.diagnosis.ring.joining import join
from collectives.diagnosis.ring.roster import Roster


class End(Enum):
    """How a neighbour has ended. The values are the bytes that a rank sends."""

    GOODBYE = b"g"  # its program has ended
    ABORT = b"a"  # it ends the job
    ORPHAN = b"o"  # it has ended itself, because the launcher on its host has died
    DEATH = b""  # without a byte
    SILENCE = None  # its host does not answer


class Heard(NamedTuple):
    """The end of a neighbour, as heard on the socket that had the file descriptor `fd`."""

    rank: int
    how: End
    fd: int
    before: bool  # whether it is the rank before this one in the ring; else it is the one after it


class _Link(NamedTuple):
    rank: int
    socket: socket.socket
    before: bool


class Neighbours:
    """The ranks before and after this one in the ring of all ranks of `mpi`. Collective. Ranks are those of `mpi`.

    Only the newest ring of a process says its goodbye. `unreached` is on all ranks the pairs of neighbours that have no connection.
    """

    def __init__(self, mpi: Any, roster: Roster) -> None:
        self._links: list[_Link] = []
        self.has_said = False  # whether this rank has told its end
        self.unreached: list[tuple[int, int]] = []
        if mpi.size > 1:
            self._join(mpi, roster)
            os.register_at_fork(
                after_in_child=self.close
            )  # a child must not keep the sockets open or say goodbye for its parent
        _Current.ring = self

    def _join(self, mpi: Any, roster: Roster) -> None:
        ring, nodes = roster.ring(), [member.node for member in roster.members]
        after = {rank: ring[(i + 1) % len(ring)] for i, rank in enumerate(ring)}
        made = join(mpi, mpi.allgather, nodes, after)
        self.unreached = [(rank, after[rank]) for rank in ring if not made.reached[rank]]
        if made.out is not None:
            self._links.append(_Link(after[mpi.rank], made.out.socket, before=False))
        self._links += [_Link(before, link.socket, before=True) for before, link in made.incoming.items()]

    @property
    def ranks(self) -> set[int]:
        """The neighbours with a connection."""
        return {link.rank for link in self._links}

    def filenos(self) -> list[int]:
        """The file descriptors of the open sockets."""
        return [link.socket.fileno() for link in self._links]

    def heard(self) -> list[Heard]:
        """The ends of neighbours since the last call. Closes their sockets."""
        found = []
        for link in self._links.copy():
            try:
                how = End(link.socket.recv(1))
            except BlockingIOError:
                continue
            except (
                ConnectionResetError,
                BrokenPipeError,
            ):  # that host has answered: the process has no socket any more
                how = End.DEATH
            except OSError:
                how = End.SILENCE
            found.append(Heard(link.rank, how, link.socket.fileno(), link.before))
            self._links.remove(link)
            link.socket.close()
        return found

    def say(self, how: End = End.GOODBYE) -> None:
        """Tell both neighbours of this rank's end. The first call counts."""
        self.has_said = True
        for link in self._links:
            with suppress(OSError):  # the neighbour has ended, or has been told
                link.socket.send(how.value or b"")
                link.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the sockets. Idempotent. A neighbour that was not told takes this for a death."""
        while self._links:
            self._links.pop().socket.close()


class _Current:
    ring: Neighbours | None = None


def say(how: End = End.GOODBYE) -> None:
    """Tell the neighbours of the end of this process. The first call counts."""
    if _Current.ring is not None:
        _Current.ring.say(how)
