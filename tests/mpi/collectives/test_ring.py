"""The ring of all ranks: who hears of which end. The ring of the job itself stays as it is."""

import time
from collections.abc import Iterator

import pytest

from collectives import Communicator
from collectives.diagnosis.ring import goodbye, roster
from collectives.diagnosis.ring.goodbye import End, Neighbours


@pytest.fixture(autouse=True)
def own_ring() -> Iterator[None]:
    """A new ring of a process replaces the one that says its goodbye, as it must after the loss of ranks, but not here."""
    before = goodbye._Current.ring
    yield
    goodbye._Current.ring = before


def heard(ring: Neighbours, number: int) -> dict[int, set[End]]:
    """By rank, what `number` sockets of the ring say. Fails if they say less within 10 s."""
    found = []
    end = time.monotonic() + 10
    while len(found) < number:
        assert time.monotonic() < end, found
        found += ring.heard()
        time.sleep(0.001)
    return {rank: {each.how for each in found if each.rank == rank} for rank in {each.rank for each in found}}


@pytest.mark.ranks(2, 3, 4)
def test_both_neighbours_hear_of_an_end(comm: Communicator) -> None:
    ring = Neighbours(comm.mpi, roster.gather(comm.mpi))
    assert (ring.unreached, len(ring.filenos()), ring.heard()) == ([], 2, [])
    comm.barrier()
    ends = [End.DEATH, End.GOODBYE, End.ABORT, End.ORPHAN]
    mine = ends[comm.rank]
    if mine is not End.DEATH:
        ring.say(mine)
        ring.say(End.ABORT)  # the first call counts
    comm.barrier()
    if mine is End.DEATH:
        ring.close()
        assert ring.heard() == []
    else:
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        assert heard(ring, 2) == {rank: {ends[rank]} for rank in (before, after)}
    comm.barrier()
    ring.close()


@pytest.mark.ranks(4)
def test_two_neighbours_that_die_together_are_both_heard_and_the_others_make_a_new_ring(comm: Communicator) -> None:
    ring = Neighbours(comm.mpi, roster.gather(comm.mpi))
    comm.barrier()
    is_lost = comm.rank in (1, 2)
    if is_lost:
        ring.close()
    else:
        lost = 1 if comm.rank == 0 else 2
        assert heard(ring, 1) == {lost: {End.DEATH}}
    rest = comm.split(int(is_lost))  # waits until both have heard of the deaths, and of nothing else
    ring.say()
    ring.close()
    again = Neighbours(rest.mpi, roster.gather(rest.mpi))
    assert (again.unreached, again.heard()) == ([], [])
    rest.barrier()
    again.say()
    assert heard(again, 2) == {1 - rest.rank: {End.GOODBYE}}
    again.close()
    rest.free()
