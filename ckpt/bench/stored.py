"""Saving and loading with `ckpt`, in its layouts and with its drivers, and with plain POSIX files. torch's DCP is in dcp.py."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

import ckpt
from ckpt.bench.state import Cut
from ckpt.bench.testbed import Testbed
from ckpt.saving.placement import Files
from collectives.bench.kit.turns import Seconds


class Stored(ABC):
    """A contestant (see collectives/bench/kit/turns.py) that saves into the folder `path`, and loads from there into other memory.

    A new contestant implements `save` and `loads`, and needs a line in bench_command.py.
    """

    def __init__(self, name: str, bed: Testbed) -> None:
        self.name, self.bed, self.path = name, bed, bed.folder / name

    @abstractmethod
    def save(self) -> None:
        """Save all bytes, and flush them to the disk."""

    @abstractmethod
    def loads(self) -> Mapping[str, Callable[[], Any]]:
        """The ways to load, by the name of the action."""

    def turn(self, round_: int) -> Seconds:
        """Save, load in each way, and remove the files. The first round compares the loaded values with the saved ones."""
        bed = self.bed
        bed.warm()
        seconds = {"save": bed.timed(self.save, f"{self.name}: save")}
        loads = list(self.loads().items())
        for action, load in loads if round_ % 2 else reversed(loads):
            with bed.comm.together(self.name):
                bed.cool(self.path)
            if round_ == 0:
                bed.target.flat[:] = 0
            seconds[action] = bed.timed(load, f"{self.name}: {action}")
            with bed.comm.together(f"{self.name}: {action}"):
                if round_ == 0 and not np.array_equal(bed.target.flat, bed.source.flat):
                    raise RuntimeError("the values that were loaded are not those that were saved")
        bed.remove(self.path)
        return seconds


class CkptFiles(Stored):
    """Our checkpoints. Their saves always have checksums and fsync."""

    def __init__(self, name: str, bed: Testbed, cuts: list[Cut], files: Files = "rank", driver: str = "posix") -> None:
        super().__init__(name, bed)
        self._tensors, self._wanted = bed.source.shards(cuts), bed.target.shards(cuts)
        self._files, self._driver = files, driver

    def save(self) -> None:
        ckpt.save(self.path, self._tensors, comm=self.bed.comm, files=self._files, driver=self._driver)

    def loads(self) -> Mapping[str, Callable[[], Any]]:
        return {
            "load": lambda: ckpt.load(self.path, self._wanted, comm=self.bed.comm),
            "load unverified": lambda: ckpt.load(self.path, self._wanted, comm=self.bed.comm, verify=False),
        }


class PosixFiles(Stored):
    """A file per rank, one tensor after the other, written and read with only system calls."""

    def __init__(self, name: str, bed: Testbed, cuts: list[Cut]) -> None:
        super().__init__(name, bed)
        self._tensors, self._wanted = bed.source.arrays(cuts), bed.target.arrays(cuts)
        self._file = self.path / f"{bed.comm.rank:05d}"

    def turn(self, round_: int) -> Seconds:
        """A turn like the others', but the folder is made before it."""
        with self.bed.comm.together(self.name):
            if self.bed.comm.rank == 0:
                self.path.mkdir()
        return super().turn(round_)

    def save(self) -> None:
        with open(self._file, "wb", buffering=0) as file:
            for left in _bytes(self._tensors.values()):
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    def loads(self) -> Mapping[str, Callable[[], Any]]:
        return {"load": self._load}

    def _load(self) -> None:
        with open(self._file, "rb", buffering=0) as file:
            for left in _bytes(self._wanted.values()):
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise OSError(f"{self._file} ends too early")
                    left = left[count:]


def _bytes(arrays: Iterable[np.ndarray]) -> Iterator[memoryview]:
    for array in arrays:
        yield array.reshape(-1).view(np.uint8).data
