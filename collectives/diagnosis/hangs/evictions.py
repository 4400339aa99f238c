"""Ends the ranks without which a job goes on, so that they are lost for MPI too: it tells the other ranks of deaths by signals alone.

A rank ends itself when its monitor is told to, or when it does not leave its work after a loss. If its monitor is stuck too, a rank of
its node ends it.
"""

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from collectives.diagnosis import dump, loss
from collectives.diagnosis.hangs import deadline
from collectives.diagnosis.hangs.deadline import Deadline
from collectives.diagnosis.hangs.node.board import Board
from collectives.diagnosis.ring.roster import Roster

_UNTOLD_S = 10.0  # after a loss, for the launcher to tell MPI: it tells deaths by signals alone
_GRACE_S = 5.0  # for a stuck rank to end itself
_JOB_GRACE_S = 20.0  # for the whole recovery, after its deadline


class Stuck(NamedTuple):
    """A recovery that cannot end: why, and the exit code of the job."""

    why: str
    code: int


def endless_recovery() -> Stuck | None:
    """A recovery that has not ended long after its deadline."""
    if not loss.is_late(_JOB_GRACE_S):
        return None
    return Stuck(
        f"the recovery from a loss has not ended within the deadline of {Deadline.seconds:g} s", deadline.EXIT_CODE
    )


class Evictions:
    """`send(rank, message)` sends a message to the monitor of a rank. Ranks are those of `roster`."""

    def __init__(self, rank: int, roster: Roster, board: Board, send: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._rank, self._roster, self._board, self._send = rank, roster, board, send

    def evict(self, rank: int, why: str) -> None:
        """End a rank: by its own monitor, and by a monitor of its node, because its own may be stuck too."""
        for other in self._roster.node_of(rank):
            if other != rank:
                self._send(other, {"kind": "end another", "rank": rank})
        self._send(rank, {"kind": "end yourself", "why": why})

    def take(self, message: Mapping[str, Any]) -> None:
        """Act on a message of `evict`."""
        if message["kind"] == "end yourself":
            dump.dump(f"{message['why']}; it ends, and the others go on without it")
            os.kill(os.getpid(), signal.SIGKILL)
        elif (slot := self._board.read(message["rank"])) is not None:
            self._board.end(slot)

    def after_loss(self) -> Stuck | None:
        """End this rank, or another one of this node, if it does not come to the recovery within the deadline.

        Returns why the job must end, if MPI waits in the recovery for a rank that is gone, or if the recovery does not end.
        """
        if loss.Known.is_handled and loss.seconds() > _UNTOLD_S and not loss.is_told():
            why = f"a rank was lost {_UNTOLD_S:g} s ago, but MPI does not know it, as if it had ended by exit() of C, not by a signal"
            return Stuck(why, 1)
        if not loss.is_late():
            return None
        if (endless := endless_recovery()) is not None:
            return endless
        if not loss.Known.is_handled:
            dump.dump(
                f"ranks were lost {Deadline.seconds:g} s ago, and this rank has not left its work; this process ends"
            )
            os.kill(os.getpid(), signal.SIGKILL)
        if loss.is_late(_GRACE_S):
            for rank in self._roster.node_of(self._rank):
                slot = self._board.read(rank)
                if rank != self._rank and slot is not None and not slot.note.startswith(loss.RECOVERING):
                    self._board.end(slot)
        return None
