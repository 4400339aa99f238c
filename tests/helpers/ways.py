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


def spread(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of the axes' values for `parametrize`: all of them on 2 ranks and in a full run, else some.

    On these every value of an axis still meets some of each other axis: those combinations are taken whose places in the axes add
    up to the number of ranks, modulo the length of the shortest axis. So 3 ranks and 4 take different ones.
    """
    columns = [list(axis) for axis in axes]
    shortest = min(map(len, columns))
    places = itertools.product(*(range(len(column)) for column in columns))
    return [
        tuple(column[index] for column, index in zip(columns, place, strict=True))
        for place in places
        if FULL or MPI.COMM_WORLD.size == 2 or sum(place) % shortest == MPI.COMM_WORLD.size % shortest
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
