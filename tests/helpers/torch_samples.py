"""Datasets of torch for tests, in a module of their own: worker processes import it."""

import io
import os
import random
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from collectives.launcher import launched_rank

Sample = tuple[int, float, float, float]


def drawn(number: int) -> Sample:
    """A sample with numbers of all generators, as augmentation draws them."""
    return number, random.random(), float(np.random.rand()), float(torch.rand(()))


class Numbers(Dataset[Sample]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Sample:
        return drawn(index)


class Stream(IterableDataset[Sample]):
    """`num` samples in an order that its own generator draws, through a buffer, as streams are shuffled."""

    def __init__(self, num: int) -> None:
        self.num, self.epoch = num, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        numbers = list(range(self.epoch * 1000, self.epoch * 1000 + self.num))
        while numbers:
            yield drawn(numbers.pop(random.randrange(min(len(numbers), 4))))


class WorkerStream(Stream):
    """The samples of Stream, each with what a worker must not know: its rank, -1 if no launcher tells it, and whether MPI is loaded."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield *sample, launched_rank(), "mpi4py.MPI" in sys.modules


class Deadly(Numbers):
    """The worker that makes sample 0 is killed, as by the kernel when memory is short."""

    def __getitem__(self, index: int) -> Sample:
        if index == 0:
            assert get_worker_info() is not None
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def number_and_text(parts: dict[str, Any]) -> tuple[int, str, str]:
    """Decodes the samples of `pairs`."""
    image = np.load(io.BytesIO(parts["image.npy"]))
    assert image.shape == (4, 4) and (image == image[0, 0]).all()
    return int(image[0, 0]), parts["txt"].decode(), parts["__key__"]


def pairs(folder: Path, sizes: tuple[int, ...] = (5, 1, 7)) -> str:
    """Tar files of images with texts; returns the names of all, with braces."""
    number = 0
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"pairs-{shard}.tar", "w", format=tarfile.PAX_FORMAT) as file:
            file.addfile(directory("pairs"))
            for _ in range(size):
                image = io.BytesIO()
                np.save(image, np.full((4, 4), number))
                for ending, data in (("image.npy", image.getvalue()), ("txt", f"the number {number}".encode())):
                    info = tarfile.TarInfo(f"pairs/{number:04}.{ending}")
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))
                number += 1
    return f"{folder}/pairs-{{0..{len(sizes) - 1}}}.tar"


def directory(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE
    return info
