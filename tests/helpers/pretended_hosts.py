"""A communicator of MPI whose ranks are on one host, but say that they are on several, each with a memory of its own."""

from collections.abc import Sequence
from typing import Any, ClassVar

from mpi4py import MPI

from collectives import Communicator


def on_hosts(mpi: Any, hosts: Sequence[int], **options: Any) -> Communicator:
    """A Communicator of the ranks of `mpi`, of which rank r is on host `hosts[r]`. Collective; the caller frees it."""

    class Hosts(MPI.Intracomm):
        host_of: ClassVar[dict[int, int]] = dict(enumerate(hosts))

        def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:  # noqa: N802
            group, all_ranks = self.Get_group(), mpi.Get_group()
            (mine,) = MPI.Group.Translate_ranks(group, [self.rank], all_ranks)
            group.Free()
            all_ranks.Free()
            return self.Split(hosts[mine], key)

        def Split(self, color: int = 0, key: int = 0) -> Any:  # noqa: N802
            return Hosts(super().Split(color, key))  # the groups of a mesh are on these hosts, too

    return Communicator(Hosts(mpi.Dup()), **options)
