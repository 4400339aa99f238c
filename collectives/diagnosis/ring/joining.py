"""Connects each rank of a communicator to another one, for the ring of ranks and for the copies that go to another node."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from collectives.diagnosis.ring import addresses
from collectives.diagnosis.ring.links import Link, ListenerPlace, connect
from collectives.diagnosis.ring.listener import Listener
from collectives.diagnosis.together import Report, joined, raised_on


class Joined(NamedTuple):
    """The connections of a rank.

    `out`: to the rank that it connects to, None if it cannot. `incoming`: by rank, of those that connect to it. `reached`: on all
    ranks, for each rank whether it has connected.
    """

    out: Link | None
    incoming: dict[int, Link]
    reached: list[bool]


def join(mpi: Any, gather: Callable[[Any], list[Any]], nodes: Sequence[int], to: Mapping[int, int]) -> Joined:
    """Connect each rank of `mpi` to the rank `to` of it. Collective.

    Args:
        gather: gathers an object of each rank on all ranks, by MPI. The keys of the listeners go this way alone.
        nodes: the node of each rank. Ranks of one node connect by unix sockets.

    Raises:
        ValueError: on all ranks, MPITRAIN_LISTEN names nothing on the host of a rank.
    """
    incoming = [rank for rank in range(mpi.size) if to[rank] == mpi.rank]
    hosts: list[list[str]] = [[] for _ in range(mpi.size)]
    chosen: list[str] | None = None
    if any(nodes[rank] != nodes[other] for rank, other in to.items()):
        own: list[str] = []

        def exchange(report: Report | None) -> list[Report | None]:
            told = gather((report, own))
            hosts[:] = [its for _, its in told]
            return [its for its, _ in told]

        with joined(exchange, "", partial(raised_on, mpi)):
            chosen = addresses.chosen()
            own += addresses.addresses()
    listeners: dict[int, Listener] = {}
    out: Link | None = None
    try:
        for rank in incoming:
            is_here = nodes[rank] == nodes[mpi.rank]
            listeners[rank] = Listener(None if is_here else chosen or addresses.towards(hosts[rank]))
        places = gather({rank: tuple(listener.place) for rank, listener in listeners.items()})
        out = connect(ListenerPlace(*places[to[mpi.rank]][mpi.rank]))
        reached = gather(out is not None)
    except BaseException:  # a rank was lost
        for listener in listeners.values():
            listener.close(expected=False)
        if out is not None:
            out.socket.close()
        raise
    found = {rank: listener.close(expected=reached[rank]) for rank, listener in listeners.items()}
    return Joined(out, {rank: link for rank, link in found.items() if link is not None}, reached)
