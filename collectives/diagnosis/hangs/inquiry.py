"""One question of a monitor to all ranks."""

import time
from collections.abc import Mapping

from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.hangs.look import Look
from collectives.diagnosis.hangs.notice import Wait

ANSWER_S = 5.0  # a rank without an answer after this time is missing
LOOK_S = 0.8  # at the deadline: after this time a rank of its node looks at a rank that has not answered


class Inquiry:
    """The question, and its answers so far. `known`: states that are known already, by rank; `wait`: the wait of a notice."""

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
