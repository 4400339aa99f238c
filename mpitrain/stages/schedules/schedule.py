"""Schedules of a pipeline: for each rank a list of actions on stages and micro-batches. Plain data.

Stage s takes the output of stage s - 1. An action is the forward of a stage for one micro-batch (F), its whole backward (B), or one of
the two halves of a backward: the gradient of the stage's input (I), for which stage s - 1 waits, and the gradients of its weights (W),
for which only the optimizer waits (Qi et al. 2023, 2401.10241). Messages are not part of a schedule, because they follow from it: if an
action needs the result of another rank, this result is a message (`Schedule.needed`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of weights"}


class Action(NamedTuple):
    """One computation of a rank: see the module."""

    kind: Kind
    stage: int
    micro: int
    """The number of the micro-batch."""

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"

    @property
    def name(self) -> str:
        """Of its kind."""
        return NAMES[self.kind]

    @property
    def words(self) -> str:
        """For readers."""
        return f"{self.name} of stage {self.stage}, micro-batch {self.micro}"


class Times(NamedTuple):
    """Seconds of a rank for one micro-batch, of all its stages together, and of one message between two ranks."""

    forward: float = 1
    input_grads: float = 1
    weight_grads: float = 1
    message: float = 0

    @property
    def backward(self) -> float:
        return self.input_grads + self.weight_grads

    @property
    def work(self) -> float:
        """Of a rank for one micro-batch."""
        return self.forward + self.backward

    def of(self, kind: Kind, stages_per_rank: int) -> float:
        """Of one action."""
        whole = {"F": self.forward, "B": self.backward, "I": self.input_grads, "W": self.weight_grads}[kind]
        return whole / stages_per_rank


class StageTimes(NamedTuple):
    """Seconds of one action of each kind by stage, and of one message between two ranks. For example, those that a run has measured."""

    stages: tuple[Mapping[Kind, float], ...]
    message: float = 0


@dataclass(frozen=True)
class Schedule:
    """A schedule for `num_ranks` ranks, each with `stages_per_rank` stages, and `num_micro` micro-batches.

    `program(rank)`: the rank's actions in order. `rank_of(stage)`: the rank that has a stage. `idle(times)` and `peak(rank)` are the
    promises of the literature, which `check` compares with the program. `idle`: seconds that a rank waits between its first and its
    last action, of the rank that waits longest, without time for messages; None if there is no formula for these times. `peak`: the
    most forwards of stages whose activations the rank holds, because the backward (B or I) has not begun.
    """

    name: str
    num_ranks: int
    num_micro: int
    stages_per_rank: int
    program: Callable[[int], tuple[Action, ...]]
    rank_of: Callable[[int], int]
    idle: Callable[[Times], float | None]
    peak: Callable[[int], int]

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    def needed(self, action: Action) -> list[Action]:
        """The actions of other stages whose result an action needs: of a backward both kinds, of which the schedule has one."""
        kind, stage, micro = action
        if kind == "F":
            return [Action("F", stage - 1, micro)] if stage else []
        if kind == "W" or stage == self.num_stages - 1:
            return []
        return [Action("B", stage + 1, micro), Action("I", stage + 1, micro)]
