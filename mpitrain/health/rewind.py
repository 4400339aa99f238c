"""Sources of good states, to which a run goes back after steps that were not finite."""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import ckpt
from ckpt.storage.catalog import step_of
from collectives import Communicator
from mpitrain.rank0 import on_rank0


class GoodStates(Protocol):
    """States of the run that were good: checkpoints, copies in node memory."""

    def restore(self, below: int) -> int | None:
        """Put back the newest state of fewer than `below` steps, with its data position and its generators. Collective.

        Returns its number of steps; None, on all ranks, if there is no such state. Then nothing has changed.
        """


class StatesOnDisk:
    """The complete checkpoints that this job has saved, and the checkpoint from which it began.

    `folder`: of the run's checkpoints. `saved`: the steps of those that this job has saved; another job may have left others. `load`:
    puts back a checkpoint, on all ranks together. `start`: the first checkpoint, perhaps of another run, and its number of steps; None
    for a run that began at step 0.
    """

    def __init__(
        self,
        comm: Communicator,
        folder: Path,
        load: Callable[[Path | ckpt.Url], object],
        *,
        saved: Container[int],
        start: tuple[Path | ckpt.Url, int] | None = None,
    ) -> None:
        self._comm, self._folder, self._load, self._saved, self._start = comm, folder, load, saved, start

    def restore(self, below: int) -> int | None:
        ckpt.wait()  # for a save in the background, whose checkpoint may be the newest
        found = on_rank0(self._comm, lambda: self._newest(below))
        if found is None:
            return None
        path, step = found
        self._load(path)
        return step

    def _newest(self, below: int) -> tuple[Path | ckpt.Url, int] | None:
        found: dict[int, Path | ckpt.Url] = {}
        if self._start is not None and (isinstance(self._start[0], ckpt.Url) or self._start[0].exists()):
            found[self._start[1]] = self._start[0]
        for checkpoint in ckpt.list_checkpoints(self._folder) if self._folder.is_dir() else []:
            step = step_of(checkpoint.name)
            if checkpoint.complete and step is not None and step in self._saved:
                found[step] = self._folder / checkpoint.name
        step = max((step for step in found if step < below), default=None)
        return None if step is None else (found[step], step)


class InitialState:
    """The state at step 0. `begin`: makes it again, the same bits as at the start of the run."""

    def __init__(self, begin: Callable[[], object]) -> None:
        self._begin = begin

    def restore(self, below: int) -> int | None:
        if below <= 0:
            return None
        self._begin()
        return 0


class Rewind(NamedTuple):
    """A run has gone back: to the state after `step` steps, which source number `source` had."""

    step: int
    source: int


def restore(sources: Sequence[GoodStates], below: int) -> Rewind | None:
    """Put back a state of the first source that has one; None if none has. Collective."""
    for number, source in enumerate(sources):
        if (step := source.restore(below)) is not None:
            return Rewind(step, number)
    return None
