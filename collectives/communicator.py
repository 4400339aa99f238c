"""The Communicator: a group of ranks and the operations between them, on arrays of torch, NumPy, CuPy and JAX.

Collectives are called in the same order on every rank of a communicator. An array is checked on its own rank before anything is
sent: TypeError for what is no array or a dtype outside the table, ValueError for non-contiguous or read-only arrays and for sizes
that do not fit each other. What differs between ranks is found in checked mode (`checked=True` or MPITRAIN_DEBUG=1).
"""

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np

from collectives import diagnosis, table_cache
from collectives.arrays import Buffer, is_on_device, like
from collectives.diagnosis import monitor, stacks
from collectives.diagnosis.record import Entry, Log
from collectives.dtypes import TABLE, DType, dtype_of
from collectives.group import Group
from collectives.operations import Collectives
from collectives.plans import Plans
from collectives.selection import Placement, Selector
from collectives.table import Table, built_in
from collectives.transports.memory import NodeMemory
from collectives.transports.shared import Shared
from collectives.transports.two_level import TwoLevel
from collectives.work import Deferred, Freed, Progress, Thread, Transfer, Work

_log = logging.getLogger("collectives")

_USER_TAG = 1 << 8  # tags below are the library's own
_NUM_USER_TAGS = (1 << 15) - _USER_TAG  # MPI guarantees tags up to 32767


@functools.cache
def world() -> "Communicator":
    """The one Communicator of all ranks, on a private clone of COMM_WORLD. Starts MPI at the first call, which is collective.

    From then on an uncaught exception on one rank ends the job instead of leaving the others to wait for ever, and so does an
    operation that waits longer than the deadline (MPITRAIN_DEADLINE_S, 600 s). SIGUSR2 prints the last operations.
    """
    from mpi4py import MPI

    clone = MPI.COMM_WORLD.Dup()
    if clone.size > 1:
        diagnosis.abort_on_uncaught(clone)
    progress = _choose_progress(clone, MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    comm = Communicator(clone, progress=progress, _name="world")
    monitor.start(clone, checked=comm.checked)
    # Runs before the monitor's, for which this rank has then ended, and before mpi4py's own, which ends MPI.
    atexit.register(_close, progress)
    comm._take(_measured_table(comm))
    return comm


def _close(progress: Progress) -> None:
    """At the end of the process: carry out what other ranks may wait for, unless an error ends it, which not all may have come to."""
    if not hasattr(sys, "last_value") and not diagnosis.is_leaving_together():
        progress.close()


def _measured_table(comm: "Communicator") -> Table:
    """What was measured on this machine for so many ranks and nodes, as rank 0 finds it, over the built-in table."""
    if comm.size == 1:
        return built_in()
    measured = table_cache.read(comm.machine()) if comm.rank == 0 else None
    data = comm.mpi.bcast(None if measured is None else measured.to_dict())
    return built_in() if data is None else Table.from_dict(data).over(built_in())


def _ranks_of_job(mpi: Any) -> list[int]:
    """The ranks of `mpi` as COMM_WORLD numbers them."""
    from mpi4py import MPI

    group, world = mpi.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks: list[int] = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return ranks


def _choose_progress(mpi: Any, threads_allowed: bool) -> Progress:
    """A progress thread if MPITRAIN_PROGRESS_THREAD=1, or unless it is 0 where every rank has two cores or more. Collective."""
    chosen = os.environ.get("MPITRAIN_PROGRESS_THREAD", "auto")
    if chosen not in ("0", "1", "auto"):
        raise ValueError(f"MPITRAIN_PROGRESS_THREAD is {chosen!r}; expected 0, 1 or auto")
    # Ranks that are bound to cores of their own share no set of cores; others share theirs with all that have the same set.
    cores = tuple(sorted(os.sched_getaffinity(0)))
    sharing = mpi.allgather((os.uname().nodename, cores, chosen)).count((os.uname().nodename, cores, chosen))
    wanted = chosen == "1" or (chosen == "auto" and len(cores) >= 2 * sharing)
    return Thread() if all(mpi.allgather(wanted and threads_allowed)) else Deferred()


class Communicator(Collectives):
    """A group of ranks. Made by `world()`, `split` or a `Mesh`, never directly.

    `rank`, `size`; `node`: the Communicator of the ranks that share memory with this one; `num_nodes`; `placement`: how many ranks
    are on the nodes; `mpi`: mpi4py's handle; `table`: what "auto" chooses from.
    """

    _for_jax: "Communicator | None" = None  # its twin for the threads of JAX, which collectives.jax makes

    def __init__(
        self,
        mpi: Any,
        *,
        progress: Progress | None = None,
        checked: bool | None = None,
        table: Table | None = None,
        _is_node: bool = False,
        _memory: NodeMemory | None = None,
        _name: str = "",
    ) -> None:
        """`_memory`: the node's arrays known to another communicator of the same ranks. `_name`: what reports call this one."""
        # Modules that start MPI when they are imported: only now.
        from mpi4py import MPI

        from collectives.transports.device import Devices
        from collectives.transports.device_messages import reach
        from collectives.transports.executor import Executor
        from collectives.transports.mpi import Library, library_version, message
        from collectives.transports.scheduled import Scheduled

        self.mpi = mpi
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.checked = os.environ.get("MPITRAIN_DEBUG", "0") not in ("", "0") if checked is None else checked
        self._log = Log(_ranks_of_job(mpi), _name)
        self._progress = progress = progress or Deferred()
        self._plans, self._keeps_plans = Plans(), not self.checked
        self._group: Group | None = None
        self._twin: Communicator | None = None  # for the progress thread
        self._across: Communicator | None = None  # of the ranks of this one's number on the other nodes
        self._executor = Executor(mpi)
        self._make_scheduled = partial(Scheduled, self._executor, rank=self.rank, size=self.size)
        self._message, self._library_version = message, library_version
        self._devices, self._reach = Devices(self), reach
        self._transports: dict[str, Any] = {"mpi": Library(mpi)}
        self._infeasible: dict[str, str] = {}  # algorithms that these ranks cannot run for a reason that only they know
        # The ranks of each node, in order; and the memory that all ranks see: None on several nodes.
        self._grid: list[list[int]] = [list(range(self.size))]
        self._memory: NodeMemory | None = None
        if _is_node:
            self.node: Communicator = self
            self._memory = _memory or NodeMemory(mpi)
            self._share_memory(self._memory)
        else:
            node = mpi.Split_type(MPI.COMM_TYPE_SHARED)
            self.node = Communicator(
                node,
                progress=progress,
                checked=self.checked,
                table=table,
                _is_node=True,
                _memory=_memory,
                _name=f"{_name} node".strip(),
            )
            by_leader: dict[int, list[int]] = {}
            for rank, leader in enumerate(mpi.allgather(node.bcast(self.rank))):
                by_leader.setdefault(leader, []).append(rank)
            self._grid = list(by_leader.values())
            self._join_nodes()
        self.placement = Placement.of([len(ranks) for ranks in self._grid])
        self.num_nodes = len(self._grid)
        self._take_own(built_in() if table is None else table)

    def _share_memory(self, memory: NodeMemory) -> None:
        """Of the ranks of a node: what goes through its memory. Where that cannot be had, all else works."""
        try:
            self._transports["shared"] = Shared(self.mpi, memory)
        except OSError as error:
            self._infeasible["shared"] = str(error)
            if self.rank == 0:
                _log.warning("collectives on this node go through MPI instead of its memory: %s", error)

    def _join_nodes(self) -> None:
        """Of ranks that may be on several nodes: what the ranks of a node can do together."""
        if len(self._grid) == 1:
            self._memory = self.node._memory
            self._infeasible |= self.node._infeasible
            if "shared" in self.node._transports:
                self._transports["shared"] = self.node._transports["shared"]
            return
        if not all(self.mpi.allgather("shared" in self.node._transports)):
            self._infeasible["two_level"] = "a node has no memory to share, see the log"

    def _transport(self, algorithm: str) -> Any:
        """The Transport of an algorithm that is feasible here. The first use of "two_level" is collective, as its operations are."""
        if algorithm not in self._transports:
            if algorithm == "two_level":
                number = self.node.rank
                self._across = Communicator(
                    self.mpi.Split(number), progress=self._progress, checked=self.checked, table=self._table
                )
                shared = self.node._transports["shared"]
                assert isinstance(shared, Shared)
                self._transports[algorithm] = TwoLevel(self._grid, self.rank, shared, self._across._chosen)
            else:
                self._transports[algorithm] = self._make_scheduled(algorithm)
        return self._transports[algorithm]

    def _chosen(self, operation: str, dtype: DType, nbytes: int) -> Any:
        """The Transport that "auto" takes for arrays in private memory."""
        return self._transport(self._selector.choose(operation, "auto", dtype=dtype, nbytes=nbytes))

    @property
    def has_progress_thread(self) -> bool:
        """Whether asynchronous operations are carried out on a thread of their own, while the caller computes."""
        return self._progress.on_thread

    def algorithms(self, operation: str, dtype: DType = TABLE["float32"], nbytes: int = 0) -> tuple[str, ...]:
        """What `operation` can be asked for on these ranks, besides "auto", on such arrays in host memory."""
        return tuple(self._selector.feasible(operation, dtype=dtype, nbytes=nbytes))

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    # Groups

    def split(self, color: int, key: int = 0) -> "Communicator":
        """The ranks that pass the same `color` (0 or more), ordered by (`key`, rank here). Collective."""
        if not isinstance(color, int) or color < 0:
            raise ValueError(f"split: color {color!r}; expected a whole number, 0 or more")
        self._progress.flush()
        with self._enter("split"):
            return Communicator(
                self.mpi.Split(color, key), progress=self._progress, checked=self.checked, table=self._table
            )

    def free(self) -> None:
        """Give back the MPI communicators of this one and its `node`. Collective; never done by the garbage collector."""
        if isinstance(self._progress, Freed):
            return
        self._progress.drain()
        for other in (self._twin, self._across, self._for_jax, self.node if self.node is not self else None):
            if other is not None:
                other.free()
        with self._log.enter("free"):
            self._transports.clear()
            self._devices.free()
            self._executor.free()
            self.mpi.Free()
        self._plans.forget()
        self._progress = Freed()

    # The choice of algorithms

    @property
    def table(self) -> Table:
        """What "auto" chooses from: measured by `python -m collectives tune`, else built in. `table.to_dict()` can be kept as JSON."""
        return self._table

    def use_table(self, table: Table | Mapping[str, Any]) -> None:
        """Let "auto" choose from `table` (or what its `to_dict` gave) here, on `node`, and on later splits. Collective.

        ValueError on all ranks if it is no table, or not the same on all of them.
        """
        self._progress.flush()
        self._enter("use_table").leave()
        with self.together("use_table"):
            data = table.to_dict() if isinstance(table, Table) else table
            new = Table.from_dict(data)
        first = self.mpi.bcast(new.to_dict())
        with self.together("use_table"):
            if new.to_dict() != first:
                raise ValueError("the table differs from rank 0's; pass the same on every rank")
        self._take(new)

    def _take(self, table: Table) -> None:
        for comm in (self, self.node, self._twin, self._across, self._for_jax):
            if comm is not None:
                comm._take_own(table)

    def _take_own(self, table: Table) -> None:
        self._table = table
        self._plans.forget()
        self._selector = Selector(table, self.placement, self._infeasible)

    def machine(self) -> dict[str, Any]:
        """What figures measured on this communicator hold for: MPI library, CPU, cores, ranks a node, nodes."""
        return table_cache.this_machine(self._library_version(), self.placement)

    # Several operations

    @contextmanager
    def group(self) -> Iterator[None]:
        """Operations within `with comm.group():` are carried out at its end, as one: the same ones on all ranks.

        `send` and `recv` within it go on at the same time, so that ranks may exchange messages in any order; those of tag 0 by NCCL
        where that connects the ranks: then both ends stand in a group (see transports/device_messages.py). Neighbouring all-reduces,
        broadcasts or reduces of small arrays with the same arguments share one message. Results stand in the arrays after the block;
        nothing is done if it ends with an exception. ValueError for JAX arrays, whose results would be new arrays.
        """
        if self._group is not None:
            raise ValueError("group: this communicator is within a group already")
        group = self._group = Group()
        try:
            yield
        finally:
            self._group = None
        group.run(self)

    def _later(self, async_op: bool, method: Callable[..., Any], *arguments: Any, result: Any, **options: Any) -> Any:
        """An operation that is not carried out now: queued, or the `result` of one that its group will carry out."""
        self._progress.pending()  # an error on a communicator that was freed
        if self._group is not None:
            if async_op:
                raise ValueError("group: operations within a group take no async_op")
            self._group.add(method, arguments, options)
            return result
        if is_on_device(arguments[0]):
            return self._devices.issue(partial(method, self, *arguments, **options))
        comm = self
        if self._progress.on_thread:
            if self._twin is None:
                with self._log.enter("preparing asynchronous operations"):
                    self._twin = Communicator(
                        self.mpi.Dup(),
                        progress=self._progress,
                        checked=self.checked,
                        table=self._table,
                        _memory=self.node._memory,
                    )
            comm = self._twin
        operation = partial(method, comm, *arguments, **options)
        return self._progress.issue(partial(stacks.issued_here().carry_out, operation), self.mpi)

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
        self._progress.flush()
        self._plans.forget()
        with self._enter(kind, f"{kind}({shape}, {row.name})"):
            if self._memory is None:
                flat = np.zeros(nbytes, np.uint8)
            else:
                flat = self._memory.shared(nbytes) if kind == "shared" else self._memory.empty(nbytes)
        return like(flat.view(row.numpy), dtype).reshape(shape)

    # Point to point

    def send(self, x: Any, peer: int, tag: int = 0) -> None:
        """Send `x` to rank `peer`. Returns when `x` may be written again."""
        self._check_peer("send", peer, tag)
        if self._group is not None:
            self._group.add_message(Communicator.isend, x, peer, tag)
        elif self._progress.pending():
            self.isend(x, peer, tag).wait()
        else:
            b = Buffer(x, "x")
            with self._log.enter_pair("send", peer, tag, b.size, b.dtype.name):
                self.mpi.Send(self._message(self._reach(b)), peer, _USER_TAG + tag)

    def recv(self, x: Any, peer: int, tag: int = 0) -> Any:
        """Receive into `x` what rank `peer` sends with `tag`; returns `x`. ValueError if the message has another size."""
        self._check_peer("recv", peer, tag)
        if self._group is not None:
            self._group.add_message(Communicator.irecv, x, peer, tag)
            return x
        from mpi4py import MPI

        b = Buffer(x, "x", write_only=True)
        flat = self._reach(b)
        with self._log.enter_pair("recv", peer, tag, flat.size, b.dtype.name):
            status = MPI.Status()
            incoming = None
            while self._progress.pending() and incoming is None:
                incoming = self.mpi.Improbe(peer, _USER_TAG + tag, status)
                self._progress.advance()
            if incoming is None:
                incoming = self.mpi.Mprobe(peer, _USER_TAG + tag, status)
            nbytes = status.Get_elements(MPI.BYTE)
            if nbytes != flat.nbytes:
                # Take it off the line, so that it is not mistaken for the next one.
                incoming.Recv(self._message(np.empty(nbytes, np.uint8)))
                raise ValueError(f"recv: rank {peer} sent {nbytes} bytes, but x has {flat.nbytes}")
            incoming.Recv(self._message(flat))
        return b.result()

    def isend(self, x: Any, peer: int, tag: int = 0) -> Work:
        """`send` as a Work: `x` may be written again after its `wait()`."""
        self._check_peer("isend", peer, tag)
        return self._transfer(self.mpi.Isend, "isend", Buffer(x, "x"), peer, tag)

    def irecv(self, x: Any, peer: int, tag: int = 0) -> Work:
        """`recv` as a Work, whose `wait()` gives `x`. ValueError there if the message has another size."""
        self._check_peer("irecv", peer, tag)
        return self._transfer(self.mpi.Irecv, "irecv", Buffer(x, "x", write_only=True), peer, tag)

    def _transfer(self, start: Callable[..., Any], operation: str, b: Buffer, peer: int, tag: int) -> Work:
        from mpi4py import MPI

        status, flat = MPI.Status(), self._reach(b)

        def end(error: Exception | None) -> Any:
            nbytes = flat.nbytes if operation == "isend" or error else status.Get_elements(MPI.BYTE)
            if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise ValueError(f"irecv: rank {peer} sent more than the {nbytes} bytes of x") from None
            if error is not None:
                raise error
            if nbytes != flat.nbytes:
                raise ValueError(f"irecv: rank {peer} sent {nbytes} bytes, but x has {flat.nbytes}")
            return b.result()

        entry = self._log.enter_pair(operation, peer, tag, flat.size, b.dtype.name)
        with entry.failing():
            request = start(self._message(flat), peer, _USER_TAG + tag)
        entry.issued()
        return Transfer(self._progress, entry, request, status, end)

    # Control

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._progress.flush()
        with self._enter("barrier"):
            self.mpi.Barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """The root's `obj`, on every rank. Pickled: for small control messages, never for data."""
        self._progress.flush()
        with self._enter("broadcast_object", root=root):
            return self.mpi.bcast(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj` in order of rank. Pickled: for small control messages, never for data."""
        self._progress.flush()
        with self._enter("all_gather_object"):
            return self.mpi.allgather(obj)

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """`with comm.together("reading the data"):` - an error in the block on any rank is raised on every rank.

        The same type and text on all, naming the ranks that failed, and `collectives.on_all_ranks(error)` is true of it.
        The block must hold no collective.
        """
        self._progress.flush()
        if self.checked:
            self._enter("together").leave()  # `doing` may name a rank's own file
        return diagnosis.together(self.mpi, doing, self._log)

    def _enter(
        self,
        operation: str,
        call: str = "",
        root: int | None = None,
        op: str | None = None,
        elements: int = 0,
        dtype: str = "",
    ) -> Entry:
        """Note in the flight record that this rank enters a collective; in checked mode compare it, as `call`, with the others'."""
        entry = self._log.enter(operation, elements, dtype, op, root)
        if self.checked:
            with entry.failing():
                diagnosis.compare_calls(self.mpi, call or entry.operation.words, entry)
        return entry

    def _check_peer(self, operation: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{operation}: peer {peer} is not another one of the {self.size} ranks")
        if not 0 <= tag < _NUM_USER_TAGS:
            raise ValueError(f"{operation}: tag {tag}; expected 0 to {_NUM_USER_TAGS - 1}")
