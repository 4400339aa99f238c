"""The ranks of a communicator with their hosts and process ids, so that a report names a rank in full."""

import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives.diagnosis.job import keep
from collectives.diagnosis.record import shown_ranks

_NUM_NAMED = 4  # more ranks have no process ids in reports, and more hosts no names


class Member(NamedTuple):
    """One rank. Ranks with the same `node` share memory; `node` is the lowest of them."""

    node: int
    host: str
    pid: int


class Roster:
    """The members of a communicator, by rank."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)

    def name(self, rank: int) -> str:
        """A rank in words: "rank 3 on host2 (process 4711)"."""
        return self.names([rank])

    def names(self, ranks: Sequence[int]) -> str:
        """Ranks in words: "rank 3 on host2 (process 4711)", "ranks 0, 1 on host1 (processes 31, 32)". Many ranks: without processes."""
        if not ranks or max(ranks) >= len(self.members):
            return shown_ranks(ranks)
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.members[rank].host, []).append(rank)
        if len(ranks) > _NUM_NAMED:
            return shown_ranks(ranks) + (f" on {', '.join(by_host)}" if len(by_host) <= _NUM_NAMED else "")
        return ", ".join(
            f"{shown_ranks(there)} on {host} (process{'es' * (len(there) > 1)} "
            f"{', '.join(str(self.members[rank].pid) for rank in there)})"
            for host, there in by_host.items()
        )

    def node_of(self, rank: int) -> list[int]:
        """The ranks on the node of `rank`, in order."""
        node = self.members[rank].node
        return [other for other, member in enumerate(self.members) if member.node == node]

    def ring(self) -> list[int]:
        """All ranks, those of one node side by side."""
        return sorted(range(len(self.members)), key=lambda rank: (self.members[rank].node, rank))


NOBODY = Roster([])
"""Ranks without hosts and processes: a rank's name is its number."""


def gather(mpi: Any) -> Roster:
    """The roster of the communicator `mpi`. Collective."""
    from mpi4py import MPI

    node = keep(mpi.Split_type(MPI.COMM_TYPE_SHARED, key=mpi.rank))
    lowest = node.allreduce(mpi.rank, MPI.MIN)
    node.Free()
    return Roster([Member(*each) for each in mpi.allgather((lowest, socket.gethostname(), os.getpid()))])
