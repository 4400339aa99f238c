"""The checks of an operation's arguments that a rank makes alone, before it sends data."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.transports.transport import Counts

_MAX_INT = (1 << 31) - 1  # the largest int in MPI's C interface

Named = tuple[str, Buffer]  # the name of an array in error messages, and the array


def integer(operation: str, name: str, value: Any) -> int:
    """`value` as an int: a Python or NumPy integer, or a 0-dimensional integer array. TypeError for other values, also for floats."""
    try:
        return index(value)
    except TypeError:
        raise not_an_integer(operation, name, value) from None


def not_an_integer(operation: str, name: str, value: Any) -> TypeError:
    """The error for an argument that is not an integer."""
    return TypeError(f"{operation}: {name} is {value!r}, of type {type(value).__name__}; expected an integer")


def rank_of(operation: str, root: Any, size: int) -> int:
    """`root` as an int. TypeError if it is not an integer (a bool counts as a mistake), ValueError if it is not a rank."""
    if isinstance(root, bool):
        raise not_an_integer(operation, "root", root)
    root = integer(operation, "root", root)
    if not 0 <= root < size:
        raise ValueError(f"{operation}: root {root} is outside the {size} ranks of this communicator")
    return root


def color_and_key(color: Any, key: Any) -> tuple[int | None, int]:
    """The arguments of `split` as ints. TypeError or ValueError for values that MPI does not accept."""
    if color is not None:
        color = integer("split", "color", color)
        if not 0 <= color <= _MAX_INT:
            raise ValueError(f"split: color {color}; expected 0 to {_MAX_INT}, or None to be in no new communicator")
    key = integer("split", "key", key)
    if not -_MAX_INT <= key <= _MAX_INT:
        raise ValueError(f"split: key {key}; expected {-_MAX_INT} to {_MAX_INT}")
    return color, key


def fit(
    operation: str, counts: Iterable[int] | None, rank: int, size: int, *, part: Named, whole: Named
) -> tuple[Sequence[int], bool]:
    """The number of elements of each rank's part, and whether `part` lies in this rank's place in `whole`.

    `counts`: None if all parts have the size of `part`. ValueError if the sizes of `part` and `whole` do not fit the counts, if the
    dtypes differ, or if the arrays overlap in another place. TypeError if `counts` are not integers."""
    (part_name, small), (whole_name, large) = part, whole
    try:
        lengths = [small.size] * size if counts is None else [index(count) for count in counts]
    except TypeError:
        raise TypeError(
            f"{operation}: counts is {counts!r}; expected integers, the number of elements of each rank"
        ) from None
    if counts is not None or large.size != small.size * size or small.dtype is not large.dtype:
        if len(lengths) != size or min(lengths) < 0:
            raise ValueError(
                f"{operation}: {len(lengths)} counts, the smallest {min(lengths, default=0)}; expected {size} numbers of elements "
                "of at least 0, one for each rank"
            )
        if small.size != lengths[rank] or large.size != sum(lengths):
            raise ValueError(
                f"{operation}: {part_name} has {small.size} elements and {whole_name} {large.size}; expected "
                f"{lengths[rank]} in {part_name} and {sum(lengths)} in {whole_name} on {size} ranks"
            )
        if small.dtype != large.dtype:
            raise ValueError(f"{operation}: {part_name} is {small.dtype.name}, but {whole_name} is {large.dtype.name}")
    in_place = overlap(small, large)
    if in_place and small.address - large.address != sum(lengths[:rank]) * small.dtype.itemsize:
        raise ValueError(
            f"{operation}: {part_name} overlaps {whole_name}, but is not rank {rank}'s part of {whole_name}; pass that part, or a copy"
        )
    return lengths, in_place


def counts_of_exchange(
    send: Iterable[int] | None, recv: Iterable[int] | None, size: int, *, x: Buffer, out: Buffer
) -> Counts | None:
    """The number of elements of each part that a rank sends and receives in all_to_all; None: all parts are equal.

    TypeError if the counts are not integers, ValueError if they do not fit the arrays, or if the arrays do not fit each other."""
    if send is None and recv is None:
        if x.dtype != out.dtype or x.size != out.size or x.size % size:
            raise ValueError(
                f"all_to_all: x has {x.size} elements of {x.dtype.name}, out {out.size} of {out.dtype.name}; "
                f"expected the same dtype and number, divisible by {size} ranks"
            )
        return None
    if send is None or recv is None:
        raise ValueError("all_to_all: only one of send_counts and recv_counts is given; expected both or neither")
    found = []
    for name, given, array_name, array in (("send_counts", send, "x", x), ("recv_counts", recv, "out", out)):
        try:
            counts = [index(count) for count in given]
        except TypeError:
            raise TypeError(
                f"all_to_all: {name} is {given!r}; expected integers, the number of elements of each rank"
            ) from None
        if len(counts) != size or min(counts) < 0 or sum(counts) != array.size:
            raise ValueError(
                f"all_to_all: {name} has {len(counts)} numbers, the smallest {min(counts, default=0)}, with the sum {sum(counts)}; "
                f"expected {size} numbers of at least 0, one for each rank, with the sum {array.size}, the elements of {array_name}"
            )
        found.append(counts)
    if x.dtype != out.dtype:
        raise ValueError(f"all_to_all: x is {x.dtype.name}, but out is {out.dtype.name}; expected the same dtype")
    return Counts(*found)


def bounds_of_parts(
    operation: str, bounds: Iterable[tuple[int, int]], size: int, *, x: Buffer
) -> list[tuple[int, int]]:
    """The (begin, end) of each rank's part of `x`, as plain ints. TypeError or ValueError if they are not parts of `x`."""
    found = _pairs(bounds, f"{operation}: bounds", "rank's part")
    if len(found) != size or any(not 0 <= begin <= end <= x.size for begin, end in found):
        raise ValueError(
            f"{operation}: bounds is {found}; expected {size} pairs, one for each rank, within the {x.size} elements of x"
        )
    return found


def bounds_of_runs(
    operation: str, bounds: Iterable[tuple[int, int]], grid: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """The bounds of runs of ranks as plain ints. TypeError or ValueError if they are not runs of ranks of one node, in order.

    `grid[k]`: the ranks on node k.
    """
    found = _pairs(bounds, f"{operation}: runs.bounds", "run of ranks")
    node_of = {rank: node for node, ranks in enumerate(grid) for rank in ranks}
    least = 0
    for begin, end in found:
        if not least <= begin < end <= len(node_of):
            raise ValueError(
                f"{operation}: runs.bounds is {found}; expected runs of at least one of the {len(node_of)} ranks, in order"
            )
        if len({node_of[rank] for rank in range(begin, end)}) > 1:
            raise ValueError(
                f"{operation}: runs.bounds is {found}, but the ranks of {begin, end} are on several nodes; expected runs of ranks "
                "of one node, see comm.nodes"
            )
        least = end
    return found


def _pairs(given: Iterable[tuple[int, int]], name: str, of_each: str) -> list[tuple[int, int]]:
    try:
        return [(index(begin), index(end)) for begin, end in given]
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {given!r}; expected (begin, end) of each {of_each}") from None


def overlap(one: Buffer, other: Buffer) -> bool:
    """Whether two arrays overlap in memory."""
    if one.device is None and other.device is None:
        return np.may_share_memory(one.flat, other.flat)
    if one.device is None or other.device is None:
        return False
    at, begin = one.device.address, other.device.address
    return at < begin + other.device.nbytes and begin < at + one.device.nbytes
