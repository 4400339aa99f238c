"""Builds the program of one rank. The micro-batches of a stage come in order, so a builder names kinds and stages alone."""

from collections import Counter, deque

from mpitrain.stages.schedules.schedule import Action, Kind


class Program:
    """Actions of one rank, in order."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._forwards: Counter[int] = Counter()  # by stage
        self._backwards: Counter[int] = Counter()
        self._waiting: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self._add("F", stage, self._forwards)

    def backward(self, stage: int, *, split: bool = False) -> None:
        """The whole backward of the next micro-batch. `split`: the gradient of the input alone; `weights` computes the rest."""
        action = self._add("I" if split else "B", stage, self._backwards)
        if split:
            self._waiting.append(action._replace(kind="W"))

    def weights(self, stage: int | None = None) -> None:
        """The gradients of weights that have waited longest, of one stage or of all; nothing if none wait."""
        for action in self._waiting:
            if stage is None or action.stage == stage:
                self._actions.append(action)
                self._waiting.remove(action)
                return

    def num_forwards(self, stage: int) -> int:
        return self._forwards[stage]

    def _add(self, kind: Kind, stage: int, begun: Counter[int]) -> Action:
        action = Action(kind, stage, begun[stage])
        begun[stage] += 1
        self._actions.append(action)
        return action

    def actions(self) -> tuple[Action, ...]:
        return tuple(self._actions)
