"""Who takes part: `ckpt` in its layouts and by its drivers, and plain POSIX files. torch's DCP has a file of its own, dcp.py."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.bench.state import Cut, Memory
from ckpt.bench.timing import Seconds, Turn
from ckpt.saving.placement import Files
from collectives import Communicator


class Stored(ABC):
    """Saves into the folder `path`, and loads from there into other memory. The first `source` is what all ranks save."""

    def __init__(self, name: str, path: Path, source: Memory, target: Memory) -> None:
        self.name, self.path = name, path
        self._source, self._target = source, target

    @abstractmethod
    def save(self) -> None:
        """On return all bytes are on the disk."""

    @abstractmethod
    def loads(self) -> dict[str, Callable[[], Any]]:
        """The ways to load, by the name of the action."""

    def turn(self, turn: Turn) -> Seconds:
        """Save, load in each way, and remove what was saved."""
        turn.warm(self.path.parent, self._source.flat)
        seconds = {"save": turn.timed(self.save, f"{self.name}: save")}
        loads = list(self.loads().items())
        for action, load in loads if turn.number % 2 else reversed(loads):
            with turn.comm.together(self.name):
                turn.cool(self.path)
            if turn.checks:
                self._target.flat[:] = 0
            seconds[action] = turn.timed(load, f"{self.name}: {action}")
            if turn.checks:
                with turn.comm.together(f"{self.name}: {action}"):
                    if not np.array_equal(self._target.flat, self._source.flat):
                        raise RuntimeError("the values that were loaded are not those that were saved")
        turn.remove(self.path)
        return seconds


class Ckpt(Stored):
    """Ours."""

    def __init__(
        self, name: str, path: Path, source: Memory, target: Memory, cuts: list[Cut], comm: Communicator,
        *, files: Files = "rank", driver: str = "posix",
    ) -> None:  # fmt: skip
        super().__init__(name, path, source, target)
        self._tensors, self._wanted = source.shards(cuts), target.shards(cuts)
        self._comm, self._files, self._driver = comm, files, driver

    def save(self) -> None:
        """With checksums; fsync is not to be had without."""
        ckpt.save(self.path, self._tensors, comm=self._comm, files=self._files, driver=self._driver)

    def loads(self) -> dict[str, Callable[[], Any]]:
        """With and without a look at the checksums."""
        return {
            "load": lambda: ckpt.load(self.path, self._wanted, comm=self._comm),
            "load unverified": lambda: ckpt.load(self.path, self._wanted, comm=self._comm, verify=False),
        }


class Posix(Stored):
    """A file for each rank, one tensor behind the other, by nothing but the system's calls."""

    def __init__(
        self, name: str, path: Path, source: Memory, target: Memory, cuts: list[Cut], comm: Communicator
    ) -> None:
        super().__init__(name, path, source, target)
        self._tensors, self._wanted = source.arrays(cuts), target.arrays(cuts)
        self._file = path / f"{comm.rank:05d}"

    def turn(self, turn: Turn) -> Seconds:
        """As the others; the folder is there before."""
        with turn.comm.together(self.name):
            if turn.comm.rank == 0:
                self.path.mkdir()
        return super().turn(turn)

    def save(self) -> None:
        """write and fsync."""
        with open(self._file, "wb", buffering=0) as file:
            for array in self._tensors.values():
                left = array.reshape(-1).view(np.uint8).data
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    def loads(self) -> dict[str, Callable[[], Any]]:
        """read."""
        return {"load": self._load}

    def _load(self) -> None:
        with open(self._file, "rb", buffering=0) as file:
            for array in self._wanted.values():
                left = array.reshape(-1).view(np.uint8).data
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise OSError(f"{self._file} ends too early")
                    left = left[count:]
