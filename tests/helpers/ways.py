"""The ways to shard a model: arguments of fully_shard that must all give the same values."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from extent import FULL
from mpi4py import MPI

from collectives import Communicator, Mesh

WAYS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 1, private": {"stage": 1, "storage": "private"},
    "stage 2, private": {"stage": 2, "storage": "private"},
    "stage 3": {"storage": "resident"},
    "stage 3, private": {"storage": "private"},
    "copies of shards": {"mesh": {"dp_replicate": 2, "dp_shard": -1}},
    "copies of shards, private": {"mesh": {"dp_replicate": -1, "dp_shard": 2}, "storage": "private"},
}


_PARTS = {1: 1, 2: 2, 3: 0, 4: 3}
"""The part of the combinations that a number of ranks takes. Modulo 2, 3 and 4 these are all parts; so are those of 2 and 4 modulo 2,
for ways that need an even number of ranks."""


def spread(*axes: Iterable[Any], all_on_2: bool = True) -> list[tuple[Any, ...]]:
    """Combinations of the axes' values for `parametrize`: in a full run all of them, else on 1, 3 and 4 ranks some, and on 2 ranks all.

    On these every value of an axis still meets some of each other axis: those combinations are taken whose places in the axes add
    up to the number's part, modulo the length of the shortest axis. `all_on_2` False: some on 2 ranks too. For a test that runs on all
    numbers of ranks, marked `shared_cases`: then each combination runs on one of them, if the shortest axis has four values at most.
    """
    columns = [list(axis) for axis in axes]
    shortest = min(map(len, columns))
    places = itertools.product(*(range(len(column)) for column in columns))
    size = MPI.COMM_WORLD.size
    part = _PARTS.get(size, size)
    return [
        tuple(column[index] for column, index in zip(columns, place, strict=True))
        for place in places
        if FULL or (all_on_2 and size == 2) or sum(place) % shortest == part % shortest
    ]


@functools.cache
def mesh_of(comm: Communicator, *axes: tuple[str, int]) -> Mesh:
    return Mesh(comm, dict(axes))


def options_of(comm: Communicator, way: str) -> dict[str, Any]:
    """The arguments of fully_shard for one of WAYS."""
    options = dict(WAYS[way])
    if "mesh" in options:
        if comm.size % 2:
            pytest.skip("an odd number of ranks does not make two copies, or shards in two")
        options["mesh"] = mesh_of(comm, *options["mesh"].items())
    return options
