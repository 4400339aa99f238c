"""The place of each block: its rank, its file and its offset. All ranks compute the same places from names, sizes and numbers.

A data file holds one dataset for each dtype. In it the blocks of a rank follow each other, and the ranks that share the file follow
each other: a rank writes one range of each dataset, and no two ranks write to one page.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ckpt.format.boxes import Box, Shape, rows
from ckpt.format.hdf5 import PAGE_BYTES
from collectives.arrays.dtypes import DTYPES

BLOCK_BYTES = 64  # every block starts on a cache line: views of a mapped file are aligned for vector instructions

Files = str | int
"""`"rank"`: a file for each rank with blocks; `"node"`: one per node; `"one"`; or the most files, each for neighbouring ranks."""


class Item(NamedTuple):
    """A block that a rank writes: its tensor's name and dtype, its box in the tensor, and its first element in the file's dataset."""

    name: str
    dtype: str
    box: Box
    start: int = 0


@dataclass(frozen=True)
class DataFile:
    """One file: the lengths of its datasets, and the items of each rank that writes it, in order."""

    name: str
    elements: Mapping[str, int]
    items: Mapping[int, Sequence[Item]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that write the file. The first of them creates it."""
        return tuple(self.items)


def files_error(files: object) -> str | None:
    """The reason why `files` is wrong, or None."""
    if files in ("rank", "node", "one") or (type(files) is int and files >= 1):
        return None
    return f"files is {files!r}; expected 'rank', 'node', 'one', or a number of at least 1"


def group_ranks(files: Files, hosts: Sequence[str]) -> list[int]:
    """The number of the file of each rank; `hosts`: the node of each rank. There are no more files than ranks."""
    size = len(hosts)
    if files == "node":
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return [numbers[host] for host in hosts]
    count = {"rank": size, "one": 1}.get(files) or min(int(files), size)  # type: ignore[arg-type]
    return [rank * count // size for rank in range(size)]


def file_name(files: Files, number: int) -> str:
    """The name of the data file of that number."""
    return f"{files if files in ('rank', 'node') else 'part'}-{number:05d}.h5"


def lay_out(name: str, writers: Mapping[int, Sequence[Item]]) -> DataFile:
    """The file of `writers` (rank -> its items, at least one; their `start` is set here)."""
    ends: dict[str, int] = {}
    placed: dict[int, list[Item]] = {}
    for rank in sorted(writers):
        placed[rank] = []
        steps: dict[str, int] = {}
        for tensor, dtype, box, _ in writers[rank]:
            if (step := steps.get(dtype)) is None:  # the first block of a rank in a dataset
                itemsize = DTYPES[dtype].itemsize
                step, steps[dtype] = PAGE_BYTES // itemsize, BLOCK_BYTES // itemsize
            start = -(-ends.get(dtype, 0) // step) * step
            ends[dtype] = start + prod(box.shape)
            placed[rank].append(Item(tensor, dtype, box, start))
    return DataFile(name, ends, placed)


def assign(nbytes: Mapping[str, int], loads: Sequence[int]) -> dict[str, int]:
    """The rank that writes each tensor that all ranks hold: largest tensor first, each to the rank with the fewest bytes so far.

    `loads`: the bytes that each rank writes anyway. The result depends only on the arguments, so it is the same on all ranks.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owner = {}
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        load, rank = heap[0]
        owner[name] = rank
        heapq.heapreplace(heap, (load + nbytes[name], rank))
    return owner


def cut_evenly(tensors: Sequence[tuple[Shape, int]], parts: int) -> list[dict[int, Box]]:
    """Cut tensors, each a shape and the bytes of an element, into `parts` parts of about the same bytes: index -> box for each part.

    The tensors keep their order, and are cut between rows of the first dimension longer than 1. A part may be empty.
    """
    total = sum(prod(shape) * itemsize for shape, itemsize in tensors)
    edges = [total * part // parts for part in range(parts + 1)]
    dealt: list[dict[int, Box]] = [{} for _ in range(parts)]
    at = 0
    for index, (shape, itemsize) in enumerate(tensors):
        nbytes = prod(shape) * itemsize
        if not nbytes:
            continue
        axis = next((axis for axis, n in enumerate(shape) if n > 1), None)
        length = 1 if axis is None else shape[axis]
        row_bytes = nbytes // length
        # The row nearest to each edge, limited to the tensor.
        cuts = [min(length, max(0, (edge - at + row_bytes // 2) // row_bytes)) for edge in edges]
        for part, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                whole = Box.full(shape)
                dealt[part][index] = whole if axis is None else rows(whole, axis, start, stop - start)
        at += nbytes
    return dealt
