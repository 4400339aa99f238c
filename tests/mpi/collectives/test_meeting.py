"""Where the ranks of a node meet: what was written before is read after, and waiting holds nothing up."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.transports.node import meeting
from collectives.transports.node.meeting import WORDS, NodeMeeting

pytestmark = pytest.mark.one_node


@pytest.fixture(params=[True, False], ids=["stores in order", "stores in any order"])
def meet(request: pytest.FixtureRequest, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(meeting, "IN_ORDER", request.param)
    words: Any = comm.shared(WORDS * comm.size, np.uint64)
    return NodeMeeting(comm.mpi, memoryview(words)).meet


def test_what_was_written_before_is_read_after(comm: Communicator, meet: Callable[[], None]) -> None:
    """Two arrays in turn, as the windows are, and a rank that is slow at random."""
    turns: Any = [comm.shared((comm.size, 1000), np.int64) for _ in range(2)]
    random = np.random.default_rng(comm.rank)
    for k in range(2000):
        if random.random() < 0.005:
            time.sleep(random.random() * 2e-3)
        turns[k % 2][comm.rank] = k
        meet()
        assert (turns[k % 2] == k).all(), k
    comm.barrier()


def test_messages_go_on_while_a_rank_waits(comm: Communicator, meet: Callable[[], None]) -> None:
    """A send that must wait for its receiver to take part ends although that one waits at the meeting already."""
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    x = np.full(1 << 20, comm.rank, np.int32)
    if comm.rank == 0:
        transfer = comm.irecv(x, 1)
        meet()
        transfer.wait()
        assert (x == 1).all()
    else:
        if comm.rank == 1:
            comm.send(x, 0)
        meet()


@pytest.mark.rest
def test_a_long_wait_leaves_the_core_to_others(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank waits for nobody")
    words: Any = comm.shared(WORDS * comm.size, np.uint64)
    meet = NodeMeeting(comm.mpi, memoryview(words)).meet
    meet()
    if comm.rank == 0:
        time.sleep(1)
        meet()
    else:
        used = time.process_time()
        meet()
        assert time.process_time() - used < 0.6
