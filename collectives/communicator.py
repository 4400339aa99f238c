"""The Communicator: a group of ranks and the operations between them, on torch and NumPy arrays.

Collectives are called in the same order on every rank of a communicator. An array is checked on its own rank before anything is
sent: TypeError for what is no array or a dtype outside the table, ValueError for non-contiguous or read-only arrays and for sizes
that do not fit each other. What differs between ranks is found in checked mode (`checked=True` or MPITRAIN_DEBUG=1).
"""

import functools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import numpy as np

from collectives import diagnosis
from collectives.arrays import Buffer, like
from collectives.dtypes import dtype_of
from collectives.operations import Collectives
from collectives.schedules import Step


@functools.cache
def world() -> "Communicator":
    """The one Communicator of all ranks, on a private clone of COMM_WORLD. Starts MPI at the first call, which is collective.

    From then on an uncaught exception on one rank ends the job instead of leaving the others to wait for ever.
    """
    from mpi4py import MPI

    clone = MPI.COMM_WORLD.Dup()
    if clone.size > 1:
        diagnosis.abort_on_uncaught(clone)
    return Communicator(clone)


_USER_TAG = 1 << 8  # tags below are the library's own
_NUM_USER_TAGS = (1 << 15) - _USER_TAG  # MPI guarantees tags up to 32767


class Communicator(Collectives):
    """A group of ranks. Made by `world()`, `split` or a `Mesh`, never directly.

    `rank`, `size`; `node`: the Communicator of the ranks that share memory with this one; `num_nodes`; `mpi`: mpi4py's handle.
    """

    def __init__(self, mpi: Any, *, checked: bool | None = None, _node: "Communicator | None" = None) -> None:
        from mpi4py import MPI

        from collectives.transports import mpi as transport
        from collectives.transports.shared import NodeMemory

        self.mpi = mpi
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.checked = os.environ.get("MPITRAIN_DEBUG", "0") not in ("", "0") if checked is None else checked
        self._transport: Any = transport  # a module that starts MPI when it is imported: only now
        self._programs: dict[tuple[str, str, int], tuple[int, tuple[Step, ...]]] = {}
        if _node is None:
            _node = Communicator(mpi.Split_type(MPI.COMM_TYPE_SHARED), checked=self.checked, _node=self)
            self.num_nodes: int = mpi.allreduce(1 if _node.rank == 0 else 0)
            self.node: Communicator = _node
            # None on several nodes: there is no memory that all these ranks see.
            self._memory: NodeMemory | None = _node._memory if self.num_nodes == 1 else None
        else:
            self.num_nodes = 1
            self.node = self
            self._memory = NodeMemory(mpi)

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    # Groups

    def split(self, color: int, key: int = 0) -> "Communicator":
        """The ranks that pass the same `color` (0 or more), ordered by (`key`, rank here). Collective."""
        if color < 0:
            raise ValueError(f"split: color {color}; expected 0 or more")
        if self.checked:
            diagnosis.compare_calls(self.mpi, "split")
        return Communicator(self.mpi.Split(color, key), checked=self.checked)

    def free(self) -> None:
        """Give back the MPI communicators of this one and its `node`. Collective; never done by the garbage collector."""
        if self.node is not self:
            self.node.free()
        self.mpi.Free()

    # Memory of the node

    def empty(self, shape: int | Sequence[int], dtype: object) -> Any:
        """An array of this rank's own that its peers on the node can read: reductions on it move each element once. Collective.

        A torch tensor for a torch dtype, else a NumPy array; zeros. All ranks pass the same shape and dtype. On a communicator of
        several nodes it is ordinary memory. OSError on all ranks if the node's shared memory is full.
        """
        return self._allocate("empty", shape, dtype)

    def shared(self, shape: int | Sequence[int], dtype: object) -> Any:
        """One array, the same memory on every rank: `comm.node.shared(...)`. Collective. Zeros.

        A torch tensor for a torch dtype, else a NumPy array. Who writes what when is the caller's to order, by `barrier()`.
        ValueError on a communicator of several nodes; OSError on all ranks if the node's shared memory is full.
        """
        if self.num_nodes > 1:
            raise ValueError(
                f"shared: these {self.size} ranks are on {self.num_nodes} nodes; call comm.node.shared(...)"
            )
        return self._allocate("shared", shape, dtype)

    def _allocate(self, kind: str, shape: int | Sequence[int], dtype: object) -> Any:
        row = dtype_of(dtype)
        shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if any(length < 0 for length in shape):
            raise ValueError(f"{kind}: shape {shape}; expected lengths of at least 0")
        nbytes = prod(map(int, shape)) * row.itemsize
        if self.checked:
            diagnosis.compare_calls(self.mpi, f"{kind}({shape}, {row.name})")
        if self._memory is None:
            flat = np.zeros(nbytes, np.uint8)
        else:
            flat = self._memory.shared(nbytes) if kind == "shared" else self._memory.empty(nbytes)
        return like(flat.view(row.numpy), dtype).reshape(shape)

    # Point to point

    def send(self, x: Any, peer: int, tag: int = 0) -> None:
        """Send `x` to rank `peer`. Returns when `x` may be written again."""
        self._check_peer("send", peer, tag)
        self.mpi.Send(self._transport.message(Buffer(x, "x").flat), peer, _USER_TAG + tag)

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any:
        """Receive into `x` what rank `peer` sends with `tag`; returns `x`. ValueError if the message has another size."""
        self._check_peer("recv", peer, tag)
        b = Buffer(x, "x", writable=True)
        status = self._transport.MPI.Status()
        self.mpi.Probe(peer, _USER_TAG + tag, status)
        nbytes = status.Get_elements(self._transport.MPI.BYTE)
        if nbytes != b.flat.nbytes:
            # Take it off the line, so that it is not mistaken for the next one.
            self.mpi.Recv(self._transport.message(np.empty(nbytes, np.uint8)), peer, _USER_TAG + tag)
            raise ValueError(f"recv: rank {peer} sent {nbytes} bytes, but x has {b.flat.nbytes}")
        self.mpi.Recv(self._transport.message(b.flat), peer, _USER_TAG + tag)
        b.flush()
        return x

    # Control

    def barrier(self) -> None:
        """Return when every rank has called it."""
        if self.checked:
            diagnosis.compare_calls(self.mpi, "barrier")
        self.mpi.Barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """The root's `obj`, on every rank. Pickled: for small control messages, never for data."""
        if self.checked:
            diagnosis.compare_calls(self.mpi, f"broadcast_object(root={root})")
        return self.mpi.bcast(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj` in order of rank. Pickled: for small control messages, never for data."""
        if self.checked:
            diagnosis.compare_calls(self.mpi, "all_gather_object")
        return self.mpi.allgather(obj)

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """`with comm.together("reading the data"):` - an error in the block on any rank is raised on every rank.

        The same type and text on all, naming the ranks that failed, and `collectives.on_all_ranks(error)` is true of it.
        The block must hold no collective.
        """
        if self.checked:
            diagnosis.compare_calls(self.mpi, "together")  # `doing` may name a rank's own file
        return diagnosis.together(self.mpi, doing)

    def _check_peer(self, operation: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{operation}: peer {peer} is not another one of the {self.size} ranks")
        if not 0 <= tag < _NUM_USER_TAGS:
            raise ValueError(f"{operation}: tag {tag}; expected 0 to {_NUM_USER_TAGS - 1}")
