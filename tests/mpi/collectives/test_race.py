"""Long private arrays on a node: two ways, of which each call may take either, with the same result to the bit."""

from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.arrays.dtypes import TABLE
from collectives.transports.node import shared
from collectives.transports.node.shared import Race

OPERATIONS = ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "all_to_all")


def carry_out(comm: Communicator, operation: str, dtype: np.dtype) -> list[bytes]:
    count = (6 << 20) // dtype.itemsize // comm.size * comm.size  # a part is long enough, on four ranks too
    x = np.random.default_rng([comm.rank, 5]).standard_normal(count).astype(dtype)
    out = np.zeros_like(x)
    part = np.zeros(count // comm.size, dtype)
    call = getattr(comm, operation)
    match operation:
        case "all_reduce" | "reduce" | "broadcast":
            call(x, algorithm="shared")
        case "reduce_scatter":
            call(part, x, algorithm="shared")
        case "all_gather":
            call(out, x[: part.size].copy(), algorithm="shared")
        case "all_to_all":
            call(out, x, algorithm="shared")
    return [x.tobytes(), out.tobytes(), part.tobytes()]


@pytest.mark.rest
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int16"])
def test_both_ways_give_the_same_bits(comm: Communicator, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not comm.reads_peers:
        pytest.skip("there is one way only where the kernel does not let ranks read each other's memory")
    for operation in OPERATIONS:
        results = []
        for way in (0, 1):
            monkeypatch.setattr(Race, "pick", lambda self, kind, way=way: way)
            taken: list[Any] = []
            monkeypatch.setattr(Race, "took", lambda self, kind, way, seconds, taken=taken: taken.append(way))
            results.append(carry_out(comm, operation, TABLE[dtype].numpy))
            assert set(taken) == {way}, f"{operation} did not take the way that was picked"
        assert results[0] == results[1], operation


def test_ranks_take_the_way_that_rank_0_picks(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    if not comm.reads_peers:
        pytest.skip("there is one way only where the kernel does not let ranks read each other's memory")
    taken: list[int] = []
    picks = iter([0, 1, 1, 0, 1])
    monkeypatch.setattr(Race, "pick", lambda self, kind: next(picks) if comm.rank == 0 else comm.rank % 2)
    monkeypatch.setattr(Race, "took", lambda self, kind, way, seconds: taken.append(way))
    x = np.zeros(1 << 19, np.float32)
    for _ in range(5):
        comm.all_reduce(x, algorithm="shared")
    assert taken == [0, 1, 1, 0, 1]


def test_the_faster_way_is_taken_and_the_other_tried_again() -> None:
    race, took = Race(), {0: 2.0, 1: 1.0}
    ways = []
    for call in range(40):
        if call == 20:
            took[1] = 5.0  # the cores are far from each other now
        ways.append(race.pick("a kind"))
        race.took("a kind", ways[-1], took[ways[-1]])
    again = shared._TRY_AGAIN
    assert ways[:3] == [0, 1, 1]
    assert [call for call in range(3, 20) if ways[call] == 0] == [again - 1]
    assert ways[20:23] == [1, 1, 1] and ways[23] == 0, "it gives up after three slow calls"
    assert [call for call in range(23, 40) if ways[call] == 1] == [2 * again - 1]
    assert race.pick("another kind") == 0
