"""The ranks of a communicator with their hosts and process ids, so that a report names a rank in full."""

import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives.diagnosis.record import shown_ranks


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
        if not 0 <= rank < len(self.members):
            return f"rank {rank}"
        member = self.members[rank]
        return f"rank {rank} on {member.host} (process {member.pid})"

    def names(self, ranks: Sequence[int]) -> str:
        """Ranks in words. A single rank has its name, several have only their numbers."""
        return self.name(ranks[0]) if len(ranks) == 1 else shown_ranks(ranks)

    def node_of(self, rank: int) -> list[int]:
        """The ranks on the node of `rank`, in order."""
        node = self.members[rank].node
        return [other for other, member in enumerate(self.members) if member.node == node]

    def ring(self) -> list[int]:
        """All ranks, those of one node side by side."""
        return sorted(range(len(self.members)), key=lambda rank: (self.members[rank].node, rank))


def gather(mpi: Any) -> Roster:
    """The roster of the communicator `mpi`. Collective."""
    from mpi4py import MPI

    node = mpi.Split_type(MPI.COMM_TYPE_SHARED, key=mpi.rank)
    lowest = node.allreduce(mpi.rank, MPI.MIN)
    node.Free()
    return Roster([Member(*each) for each in mpi.allgather((lowest, socket.gethostname(), os.getpid()))])
