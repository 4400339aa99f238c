"""Sources of good states, to which a run goes back after steps that were not finite."""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Protocol

import ckpt
from ckpt.storage.catalog import step_of
from collectives import Communicator
from mpitrain.placement.rank0 import on_rank0


class GoodStates(Protocol):
    """States of the run that were good: checkpoints, copies in node memory. All methods are collective."""

    def newest(self, below: int) -> int | None:
        """The number of steps of the newest state that has fewer than `below`; None, on all ranks, if there is no such state."""

    def restore(self, below: int) -> None:
        """Put back the state that `newest` has found, with its data position and its generators."""


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

    def newest(self, below: int) -> int | None:
        found = self._find(below)
        return None if found is None else found[1]

    def restore(self, below: int) -> None:
        found = self._find(below)
        assert found is not None
        self._load(found[0])

    def _find(self, below: int) -> tuple[Path | ckpt.Url, int] | None:
        ckpt.wait()  # for a save in the background, whose checkpoint may be the newest
        return on_rank0(self._comm, lambda: self._newest(below))

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

    def newest(self, below: int) -> int | None:
        return 0 if below > 0 else None

    def restore(self, below: int) -> None:
        self._begin()


def restore(sources: Sequence[GoodStates], below: int) -> int | None:
    """Put back the newest state of all sources; of the first source, if several have it. Collective.

    Returns its number of steps; None if there is none. Then nothing has changed.
    """
    newest: dict[int, GoodStates] = {}
    for source in sources:
        if (step := source.newest(below)) is not None:
            newest.setdefault(step, source)
    if not newest:
        return None
    newest[max(newest)].restore(below)
    return max(newest)
