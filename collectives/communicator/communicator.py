"""The Communicator: a group of ranks and the operations between them, on arrays of torch, NumPy, CuPy and JAX.

Collectives are called in the same order on every rank of a communicator, by one thread at a time: RuntimeError for a second one
that comes while the first is inside. An array is checked on its own rank before anything is sent: TypeError for what is no array or
a dtype outside the table, ValueError for non-contiguous or read-only arrays and for sizes that do not fit each other. What differs
between ranks is found in checked mode (`checked=True` or MPITRAIN_DEBUG=1).
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, SupportsIndex, overload

from collectives.arrays.dtypes import TABLE, DType
from collectives.communicator.allocation import Allocation
from collectives.communicator.arguments import color_and_key
from collectives.communicator.control import Control
from collectives.communicator.group import Group
from collectives.communicator.messages import InFlight, Messages
from collectives.communicator.operations import Collectives
from collectives.communicator.plans import Plans
from collectives.diagnosis.record import Log
from collectives.environment import switch
from collectives.progress.issued import Issues
from collectives.progress.unusable import Freed
from collectives.progress.work import Deferred, Progress
from collectives.selection import table_cache
from collectives.selection.selector import WITHIN_NODE, Placement, Selector
from collectives.selection.table import Table, built_in
from collectives.transports.node.memory import NodeMemory
from collectives.transports.node.shared import Shared
from collectives.transports.node.staged import Staged
from collectives.transports.two_level import TwoLevel

_log = logging.getLogger("collectives")


class Communicator(Collectives, Messages, Control, Allocation):
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

        from collectives.transports.executor import Executor
        from collectives.transports.gpu.device import Devices
        from collectives.transports.gpu.device_messages import reach
        from collectives.transports.mpi import Library, library_version, message, ranks_of_job
        from collectives.transports.scheduled import Scheduled

        self.mpi = mpi
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.checked = bool(switch("MPITRAIN_DEBUG")) if checked is None else checked
        ranks = ranks_of_job(mpi)
        self._log = Log(ranks, _name)
        self._progress = progress = progress or Deferred()
        self._issues: Issues | None = None
        if not progress.on_thread:
            self._issues = Issues(mpi, Log(ranks, f"{_name} async_op".strip()), checked=self.checked)
        self._issued = None
        self._in_flight = InFlight()
        self._plans, self._keeps_plans = Plans(), not self.checked
        self._group: Group | None = None
        self._to_self: Counter[int] = Counter()
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
        if self._memory is not None:
            self._memory.on_allocation(self._plans.forget)  # it may lie where a planned array was
        self.placement = Placement.of([len(ranks) for ranks in self._grid])
        self.num_nodes = len(self._grid)
        self._take_own(built_in() if table is None else table)

    def _share_memory(self, memory: NodeMemory) -> None:
        """Of the ranks of a node: what goes through its memory. Where that cannot be had, all else works."""
        try:
            staged = Staged(self.mpi)
            self._transports |= {"staged": staged, "shared": Shared(self.mpi, memory, staged)}
        except OSError as error:
            self._infeasible |= dict.fromkeys(WITHIN_NODE, str(error))
            if self.rank == 0:
                _log.warning("collectives on this node go through MPI instead of its memory: %s", error)

    def _join_nodes(self) -> None:
        """Of ranks that may be on several nodes: what the ranks of a node can do together."""
        if len(self._grid) == 1:
            self._memory = self.node._memory
            self._infeasible |= self.node._infeasible
            self._transports |= {name: of for name, of in self.node._transports.items() if name in WITHIN_NODE}
            return
        if not all(self.mpi.allgather("shared" in self.node._transports)):
            self._infeasible["two_level"] = "a node has no memory to share, see the log"

    def _transport(self, algorithm: str) -> Any:
        """The Transport of an algorithm that is feasible here. The first use of "two_level" is collective, as its operations are."""
        if algorithm not in self._transports:
            if algorithm == "two_level":
                number = self.node.rank
                self._across = Communicator(
                    self.mpi.Split(number), progress=self._progress.of_process, checked=self.checked, table=self._table
                )
                shared = self.node._transports["shared"]
                assert isinstance(shared, Shared)
                self._transports[algorithm] = TwoLevel(self._grid, self.rank, shared, self._across._chosen)
            else:
                self._transports[algorithm] = self._make_scheduled(algorithm)
        return self._transports[algorithm]

    @property
    def reads_peers(self) -> bool:
        """Whether the kernel lets these ranks, all on one node, read each other's private memory."""
        shared = self._transports.get("shared")
        return isinstance(shared, Shared) and shared.reads_private

    def _chosen(self, operation: str, dtype: DType, nbytes: int) -> Any:
        """The Transport that "auto" takes for arrays in private memory."""
        return self._transport(self._selector.choose(operation, "auto", dtype=dtype, nbytes=nbytes))

    @property
    def has_progress_thread(self) -> bool:
        """Whether asynchronous operations are carried out on a thread of their own, while the caller computes."""
        return self._progress.on_thread

    def overlaps(self, *, on_device: bool = False) -> bool:
        """Whether an asynchronous collective goes on while the caller computes. The same on all ranks.

        In host memory: on a progress thread. `on_device`, in GPU memory: by NCCL, which is known after the first collective there.
        """
        return self._devices.by_nccl if on_device else self._progress.on_thread

    def algorithms(self, operation: str, dtype: DType = TABLE["float32"], nbytes: int = 0) -> tuple[str, ...]:
        """What `operation` can be asked for on these ranks, besides "auto", on such arrays in host memory."""
        return tuple(self._selector.feasible(operation, dtype=dtype, nbytes=nbytes))

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    # Groups

    @overload
    def split(self, color: SupportsIndex, key: SupportsIndex = 0) -> "Communicator": ...

    @overload
    def split(self, color: None, key: SupportsIndex = 0) -> None: ...

    @overload
    def split(self, color: SupportsIndex | None, key: SupportsIndex = 0) -> "Communicator | None": ...

    def split(self, color: SupportsIndex | None, key: SupportsIndex = 0) -> "Communicator | None":
        """The ranks that pass the same `color` (0 to 2147483647), ordered by (`key`, rank here). Collective.

        A rank that passes None stays out, and gets None.
        """
        from mpi4py import MPI

        color, key = color_and_key(color, key)
        self._flush()
        with self._enter("split"):
            if color is None:
                self.mpi.Split(MPI.UNDEFINED, key)
                return None
            return Communicator(
                self.mpi.Split(color, key), progress=self._progress.of_process, checked=self.checked, table=self._table
            )

    @property
    def is_freed(self) -> bool:
        """Whether `free` was called."""
        return type(self._progress) is Freed  # isinstance asks an ABC: 0.1 us

    def free(self) -> None:
        """Give back the MPI communicators of this one and its `node`. Collective; never done by the garbage collector.

        Waits for what is in flight, also for messages. After that of the world `collectives.world()` makes a new one.
        """
        if isinstance(self._progress, Freed):  # also in a forked child, which has nothing to give back
            return
        self._in_flight.finish()
        self._progress.drain()
        for other in (self._twin, self._across, self._for_jax, self.node if self.node is not self else None):
            if other is not None:
                other.free()
        with self._log.enter("free"):
            self._transports.clear()
            self._devices.free()
            self._executor.free()
            if self._issues is not None:
                self._issues.free()
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
        self._flush()
        self._enter("use_table").leave()
        with self.together("use_table"):
            new = Table.from_dict(table.to_dict() if isinstance(table, Table) else table)
        with self._log.enter("use_table", root=0):
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
        where that connects the ranks: then both ends stand in a group (see transports/gpu/device_messages.py). Whatever their place in
        the block, messages set out before its collectives and arrive after them: of arrays in host memory that these use too, a send
        takes what they hold when the block ends, and what is received stands in them at last. Neighbouring all-reduces, broadcasts
        or reduces of small arrays with the same arguments share one message, with the results of calls in turn; arrays that overlap
        each other do so on all ranks. Results stand in the arrays after the block. Nothing is done if an exception leaves it. A group
        in another of this communicator is a part of it. ValueError for JAX arrays.
        """
        if self._group is not None:
            with self._group.within():
                yield
            return
        group = self._group = Group(str(self._log))
        try:
            yield
        finally:
            self._group = None
        group.run(self)

    def _on_progress(self) -> "Communicator":
        """The communicator that carries out asynchronous operations: this one, or its twin for the progress thread."""
        if not self._progress.on_thread:
            return self
        if self._twin is None:
            with self._enter("preparing asynchronous operations"):
                self._twin = Communicator(
                    self.mpi.Dup(),
                    progress=self._progress.of_process,
                    checked=self.checked,
                    table=self._table,
                    _memory=self.node._memory,
                )
        return self._twin
