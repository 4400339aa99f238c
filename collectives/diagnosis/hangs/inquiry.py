"""The questions of a monitor to all ranks, and its answers to theirs."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives.diagnosis import dump
from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.hangs.node.board import Board
from collectives.diagnosis.hangs.node.look import Look, look
from collectives.diagnosis.hangs.notice import Notices, Wait
from collectives.diagnosis.ring.roster import Roster

GRACE_S = 5.0  # for a report and MPI_Abort
CONFIRM_S = 0.15  # checked mode: after this time a monitor asks again, to confirm a deadlock
ANSWER_S = 5.0  # a rank without an answer after this time is missing
LOOK_S = 0.8  # at the deadline: after this time a rank of its node looks at a rank that has not answered


class Inquiry:
    """One question, and its answers so far. `known`: states that are known already, by rank; `wait`: the wait of a notice."""

    def __init__(
        self, purpose: str, number: int, size: int, known: Mapping[int, State], wait: Wait | None = None
    ) -> None:
        self.purpose = purpose  # "places", "deadline", "notice", "order" or "end"
        self.number = number
        self.wait = wait
        self.asked = time.monotonic()
        self.asked_cpu = time.thread_time()
        self.states: list[State | None] = [known.get(rank) for rank in range(size)]
        self.late: Waiting | None = None  # the operation for which ranks have been looked at
        self.looks: dict[int, Look] = {}

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank, state in enumerate(self.states) if state is None]

    def is_over(self, now: float) -> bool:
        """Whether all ranks have answered or will not, or the time for answers is over."""
        awaited = [rank for rank in self.missing if rank not in self.looks or not self.looks[rank].is_final]
        return not awaited or now - self.asked > ANSWER_S


class Inquiries:
    """The question of this rank's monitor to the ranks of `roster`, one at a time. Ranks exchange them by `send(rank, message)`."""

    def __init__(
        self,
        rank: int,
        roster: Roster,
        board: Board,
        send: Callable[[int, Mapping[str, Any]], None],
        notices: Notices,
        state: Callable[[], State],
    ) -> None:
        """`state`: this rank's answer."""
        self._rank, self._roster, self._board, self._send, self._notices = rank, roster, board, send, notices
        self._state, self._num_asked = state, 0
        self.current: Inquiry | None = None
        self.quiet_until = {"deadline": 0.0, "order": 0.0, "end": 0.0}
        """By purpose: this rank does not ask before that time, as another rank has asked, or its own question was answered."""
        # By purpose: each rank that the last inquiry found stuck, and the number of its operation.
        self._suspects: dict[str, dict[int, int]] = {"order": {}, "end": {}}

    def ask(
        self,
        purpose: str,
        *,
        why: str = "",
        known: Mapping[int, State] | None = None,
        wait: Wait | None = None,
        age_s: float = 0.0,
    ) -> None:
        """Ask all ranks but the `known` ones. If there is a `why`, they write their record files. `wait`, `age_s`: of a notice."""
        self._num_asked += 1
        known = {**(known or {}), self._rank: self._state()}
        inquiry = self.current = Inquiry(purpose, self._num_asked, len(self._roster.members), known, wait)
        question = {"kind": "ask", "purpose": purpose, "number": inquiry.number, "why": why, "age": age_s}
        for rank in inquiry.missing:
            self._send(rank, question)

    def take(self, rank: int, message: Mapping[str, Any]) -> None:
        """Act on a message of another rank's inquiry, or on an answer to this rank's."""
        inquiry = self.current
        if message["kind"] == "ask":
            purpose = message["purpose"]
            if message["why"]:
                dump.write_file(message["why"])
            # This rank's inquiry is dropped if a lower rank asks for the same purpose.
            mine = inquiry is not None and inquiry.purpose == purpose
            if not mine or rank < self._rank:
                if mine:
                    self.current = None
                pause = ANSWER_S + 2 * GRACE_S if purpose == "deadline" else 4 * CONFIRM_S
                self.quiet_until[purpose] = time.monotonic() + pause
                if purpose == "notice":
                    self._notices.told(message["age"])
            self._send(rank, {"kind": "answer", "number": message["number"], "state": self._state()})
        elif message["kind"] == "look":
            looks = look(self._board, message["ranks"])
            self._send(rank, {"kind": "looked", "number": message["number"], "looks": looks})
        elif inquiry is not None and inquiry.number == message["number"]:
            if message["kind"] == "answer":
                inquiry.states[rank] = message["state"]
            else:
                inquiry.looks.update({int(each): Look(*words) for each, words in message["looks"].items()})

    def look_at(self, ranks: Sequence[int], inquiry: Inquiry) -> None:
        """Look at ranks that have not answered, those of another node by a rank there that has answered."""
        for node in {self._roster.members[rank].node for rank in ranks}:
            there = [rank for rank in ranks if self._roster.members[rank].node == node]
            answering = [rank for rank in self._roster.node_of(node) if inquiry.states[rank] is not None]
            if self._rank in answering:
                inquiry.looks.update(look(self._board, there))
            elif answering:
                self._send(answering[0], {"kind": "look", "number": inquiry.number, "ranks": there})

    def confirmed(self, purpose: str, stuck: Mapping[int, Waiting]) -> bool:
        """Whether this inquiry and the last one for this purpose have found the same operations."""
        last, found = self._suspects[purpose], {rank: each["number"] for rank, each in stuck.items()}
        self._suspects[purpose] = found
        return bool(found) and found == last
