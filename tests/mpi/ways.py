"""The ways to shard a model: arguments of fully_shard that must all give the same values."""

import functools
from typing import Any

import pytest

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
