"""Detects lost ranks: a neighbour in the ring that has died, a host that is silent, and the death of this rank's own launcher.

Both neighbours of a rank hear its death. The one after it reports it at once, or the one before it if that one alone is on its node,
where it sees how the process has ended. The byte by which it ends the job reaches the other neighbour before that one reports the death
too. Where another rank ends the job first, a neighbour still reports a kill by the OOM killer, unless a report names one. The launcher
then ends the other ranks, which are not reported as deaths.
"""

import time
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from collectives.cgroup import NAMED, Kills, with_outer
from collectives.diagnosis import dump
from collectives.diagnosis.ending import end_process
from collectives.diagnosis.failure import is_in_report
from collectives.diagnosis.hangs.bell import Bell
from collectives.diagnosis.hangs.node import process
from collectives.diagnosis.hangs.node.board import Board
from collectives.diagnosis.ring.goodbye import End, Heard, Neighbours
from collectives.diagnosis.ring.roster import Roster
from collectives.launcher import Daemon

_CONFIRM_S = 0.3  # one neighbour of a dead rank lets the other one report first
_NAMED_S = 0.1  # for the report of the rank that ends the job
_ABORT_S = 5.0  # after another rank has ended the job: this rank ends itself if the launcher has not ended it
_ORPHAN_CODE = 1
_GUESS = ", as by os._exit, a signal or a crash"
_NO_WORDS: Mapping[int, str] = MappingProxyType({})


class Loss(NamedTuple):
    """Ranks that were lost, and what has happened to them, as a sentence. `is_silent`: their host does not answer."""

    ranks: tuple[int, ...]
    why: str
    is_silent: bool = False


class Losses:
    """`board`: of this node. `bell`: wakes the monitor. Ranks are those of `mpi`. Collective."""

    def __init__(self, mpi: Any, roster: Roster, board: Board, bell: Bell) -> None:
        self._rank, self._roster, self._board, self._bell = mpi.rank, roster, board, bell
        self._neighbours = Neighbours(mpi, roster)
        self._daemon = Daemon()
        self._heard: list[Heard] = []
        self._how: dict[int, str] = {}  # how the processes of neighbours on this node have ended, where it is known
        self._words: dict[int, str] = {}  # what they have written about their end
        # Now, because it counts from here on, and while the groups are there.
        self._kills = {rank: kills for rank in self._neighbours.ranks if (kills := self._kills_of(rank)) is not None}
        self._report_at = 0.0
        self._ends_at: float | None = None

    def start(self) -> None:
        """Let the sockets wake the monitor. Rank 0 says which neighbours have no connection."""
        for fd in self._neighbours.filenos():
            self._bell.add(fd)
        if self._rank == 0 and self._neighbours.unreached:
            dump.say(unreached(self._neighbours.unreached, self._roster))

    def look(self, now: float) -> Loss | None:
        """The next loss, if there is one. Ends this process if its launcher has died, or if another rank has ended the job.

        After this rank has told its own end, the launcher may end its neighbours, which is no loss.
        """
        self._listen(now)
        if self._ends_at is not None and now > self._ends_at:
            end_process(1)
        if self._daemon.has_died():
            # Before any report: the run's folder may belong to another job already, so nothing is printed or written.
            self._neighbours.say(End.ORPHAN)
            end_process(_ORPHAN_CODE)
        if self.is_pending and now >= self._report_at:
            heard, self._heard = self._heard, []
            if self._neighbours.has_said:
                heard = self._unnamed(heard)
            return None if not heard else lost(heard, self._roster, self._how, self._words)
        return None

    def unsaid(self, gone: Container[int]) -> Loss | None:
        """The deaths of neighbours among the ranks `gone` that `look` has not returned: a recovery may be faster than the next look.

        A neighbour that lives may have closed its socket, because it has come to the next ring.
        """
        self._listen(time.monotonic())
        heard, self._heard = [each for each in self._heard if each.rank in gone], []
        return lost(heard, self._roster, self._how, self._words) if heard else None

    def _listen(self, now: float) -> None:
        """Note the ends of neighbours since the last call, those of the rank after this one first."""
        for each in sorted(self._neighbours.heard(), key=lambda each: each.before):
            self._bell.remove(each.fd)
            if not self._neighbours.has_said or (self._ends_at is not None and each.how is End.DEATH):
                self._note(each, now)

    def _note(self, each: Heard, now: float) -> None:
        """Note the end of a neighbour."""
        if each.how is End.ABORT:
            self._ends_at = now + _ABORT_S
            self._report_at = min(self._report_at, now + _NAMED_S)
            self._neighbours.say(End.ABORT)
            dump.write_file("another rank ends the job")
        elif each.how is not End.GOODBYE:
            # In a ring of two, a rank is both before and after the other.
            if all(other.rank == each.rank for other in self._heard):
                self._report_at = now + (0.0 if each.before != knows_less(each.rank, self._roster) else _CONFIRM_S)
            self._heard.append(each)
            self._note_how(each.rank)

    def _note_how(self, rank: int) -> None:
        """Note how a process has ended, before the launcher, its parent, learns of it: after that the system has forgotten it."""
        mine, other = self._roster.members[self._rank], self._roster.members[rank]
        if mine.node == other.node and not self._how.get(rank):
            self._how[rank] = with_kill(process.how_ended(other.pid), self._kills.get(rank))
            self._words[rank] = self._board.last(rank)

    def _unnamed(self, heard: Sequence[Heard]) -> list[Heard]:
        """Of the ends of neighbours, those by the OOM killer, if no report names it."""
        return [] if is_in_report(NAMED) else [each for each in heard if NAMED in self._how.get(each.rank, "")]

    def _kills_of(self, rank: int) -> Kills | None:
        """The kills of the OOM killer in the cgroup of a rank on this node, from now on."""
        slot = self._board.read(rank)
        return Kills(with_outer(Path(slot.cgroup))) if slot is not None and slot.cgroup else None

    @property
    def is_pending(self) -> bool:
        """Whether `look` is to be called again soon."""
        return bool(self._heard) and (self._ends_at is not None or not self._neighbours.has_said)

    def close(self) -> None:
        """Close the sockets. They no longer wake the monitor, which would find them readable, or closed, all the time."""
        for fd in self._neighbours.filenos():
            self._bell.remove(fd)
        self._neighbours.close()


def lost(heard: Sequence[Heard], roster: Roster, how: Mapping[int, str], words: Mapping[int, str] = _NO_WORDS) -> Loss:
    """The loss of neighbours that have ended. The silence of a host is the loss of all its ranks. `how`: how they ended, if known;
    `words`: what they have written about it."""
    why: dict[str, tuple[int, ...]] = {}
    for each in heard:
        name, host = roster.name(each.rank), roster.members[each.rank].host
        if each.how is End.SILENCE:
            ranks = tuple(roster.node_of(each.rank))
            silent = f"{host} is silent: it has not answered for 10 s, so it is down or its link is cut; there"
            why[f"{silent} {'is' if len(ranks) == 1 else 'are'} {roster.names(ranks)}"] = ranks
        elif each.how is End.ORPHAN:
            why[f"{name} has ended itself, because the launcher on its host has died"] = (each.rank,)
        elif words.get(each.rank):
            why[f"{name} {words[each.rank]}"] = (each.rank,)
        else:
            known = f"; it {how[each.rank]}" if how.get(each.rank) else _GUESS
            why[f"{name} has died: its process ended without notice{known}"] = (each.rank,)
    ranks = tuple(sorted({rank for ranks in why.values() for rank in ranks}))
    return Loss(ranks, "\n".join(why), any(each.how is End.SILENCE for each in heard))


def without_guesses(causes: Collection[str]) -> list[str]:
    """What the neighbours of lost ranks have said, in order. Of a rank of which one knows how it ended and another one does not, the
    first alone: the launcher may have asked the system before the second one did."""
    known = [cause for cause in causes if _GUESS not in cause]
    return sorted(
        cause
        for cause in causes
        if cause in known or not any(each.startswith(cause.partition(_GUESS)[0]) for each in known)
    )


def knows_less(rank: int, roster: Roster) -> bool:
    """Whether the rank after `rank` in the ring is on another node, and the one before it is not."""
    ring = roster.ring()
    at, node = ring.index(rank), roster.members[rank].node
    before, after = (roster.members[ring[(at + step) % len(ring)]].node for step in (-1, 1))
    return before == node != after


def with_kill(how: str, kills: Kills | None) -> str:
    """How a process has ended, and that the OOM killer has ended it, if that is so. `kills`: of its cgroup. `how` may be ""."""
    if how and "SIGKILL" not in how:
        return how
    words = kills.words() if kills is not None else ""
    return f"{how or 'was killed'}: {words}" if words else how


def unreached(pairs: Sequence[tuple[int, int]], roster: Roster) -> str:
    """One line about neighbours that have no connection."""
    one, other = pairs[0]
    others = len(pairs) - 1
    more = f", and {others} more pair{'s' * (others > 1)} of neighbours" if others else ""
    cause = "perhaps a firewall blocks TCP between them"
    if roster.members[one].host == roster.members[other].host:  # no network is between them
        cause = "perhaps they are in containers that share no /dev/shm (or MPITRAIN_SHM_DIR), or of different users"
    return (
        f"notice: no connection from {roster.name(one)} to {roster.name(other)}{more}; {cause}. "
        "The death of a rank there is then detected by its other neighbour, or at the deadline alone (MPITRAIN_DEADLINE_S)"
    )
