"""Whether the arrays of a collective fit each other: what a rank can see by itself, before anything is sent."""

from collections.abc import Sequence

import numpy as np

from collectives.arrays import Buffer

Named = tuple[str, Buffer]  # an array, and what errors call it


def fit(
    operation: str, counts: Sequence[int] | None, rank: int, size: int, *, part: Named, whole: Named
) -> tuple[Sequence[int], bool]:
    """The elements of each rank's part, and whether `part` is this rank's place in `whole`.

    ValueError unless both have the sizes and the dtype that follow, or if they overlap elsewhere. `counts`: None where all are alike.
    """
    lengths = _lengths(operation, counts, rank, size, part, whole)
    return lengths, _is_in_place(operation, lengths, rank, part, whole)


def _lengths(
    operation: str, counts: Sequence[int] | None, rank: int, size: int, part: Named, whole: Named
) -> Sequence[int]:
    (part_name, small), (whole_name, large) = part, whole
    if counts is None:
        counts = [small.size] * size
        if large.size == small.size * size and small.dtype is large.dtype:
            return counts
    if len(counts) != size or min(counts) < 0:
        raise ValueError(
            f"{operation}: {len(counts)} counts, the smallest {min(counts, default=0)}; expected {size} numbers of elements "
            "from 0 on, one a rank"
        )
    if small.size != counts[rank] or large.size != sum(counts):
        raise ValueError(
            f"{operation}: {part_name} has {small.size} elements and {whole_name} {large.size}; expected "
            f"{counts[rank]} in {part_name} and {sum(counts)} in {whole_name} on {size} ranks"
        )
    if small.dtype != large.dtype:
        raise ValueError(f"{operation}: {part_name} is {small.dtype.name}, but {whole_name} is {large.dtype.name}")
    return counts


def _is_in_place(operation: str, lengths: Sequence[int], rank: int, part: Named, whole: Named) -> bool:
    (part_name, small), (whole_name, large) = part, whole
    if not overlap(small, large):
        return False
    if small.address - large.address != sum(lengths[:rank]) * small.dtype.itemsize:
        raise ValueError(
            f"{operation}: {part_name} overlaps {whole_name}, but is not rank {rank}'s place in it; pass that, or a copy"
        )
    return True


def overlap(one: Buffer, other: Buffer) -> bool:
    """Whether two arrays have elements in common."""
    if one.device is None and other.device is None:
        return np.may_share_memory(one.flat, other.flat)
    if one.device is None or other.device is None:
        return False
    at, begin = one.device.address, other.device.address
    return at < begin + other.device.nbytes and begin < at + one.device.nbytes
