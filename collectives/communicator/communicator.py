"""The Communicator: a group of ranks and the operations between them, on arrays of torch, NumPy, CuPy and JAX.

Every rank of a communicator calls the collectives in the same order, from one thread at a time: RuntimeError for a thread that calls
one while another thread is inside one. Each rank checks its arrays before it sends data: TypeError for an object that is not an array
or has an unsupported dtype, ValueError for non-contiguous or read-only arrays and for sizes that do not fit. Checked mode
(`checked=True` or MPITRAIN_DEBUG=1) also compares the calls between the ranks.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, overload

from collectives.arrays.dtypes import TABLE, DType
from collectives.communicator.allocation import Allocation
from collectives.communicator.arguments import color_and_key
from collectives.communicator.calls import CommunicatorCalls
from collectives.communicator.control import Control
from collectives.communicator.dispatch import Dispatch
from collectives.communicator.group import Groups
from collectives.communicator.messages import Messages
from collectives.communicator.operations import Collectives
from collectives.communicator.plans import Plans
from collectives.communicator.transports import Transports, ranks_by_node
from collectives.diagnosis.job import keep
from collectives.diagnosis.record import Log
from collectives.diagnosis.recorder import Recorder
from collectives.environment import switch
from collectives.progress.deferred import Deferred
from collectives.progress.issued import Issues
from collectives.progress.progress import Progress
from collectives.progress.queue import AsyncQueue
from collectives.progress.unusable import Freed
from collectives.selection import table_cache
from collectives.selection import wire as wires
from collectives.selection.selector import EXACT
from collectives.selection.table import Table, built_in
from collectives.transports.node.mappings import on_change
from collectives.transports.node.memory import NodeMemory

_log = logging.getLogger("collectives")


class Communicator(CommunicatorCalls):
    """A group of ranks. Programs get one from `world()`, `split` or a `Mesh`, never from the constructor.

    `rank`, `size`; `node`: the Communicator of the ranks on this rank's node; `num_nodes`; `nodes`: the ranks on each node;
    `placement`: the number of ranks on each node; `mpi`: mpi4py's communicator; `table`: the measurements from which "auto" chooses.

    Common to all collectives: `algorithm` is "auto" or one of `collectives.selection.selector.ALGORITHMS[operation]`. With `async_op`
    the call returns a Work instead of the result. Within `group()` an operation is carried out at the group's end. Wrong arguments
    raise in the call itself.

    Common to all messages: `x` is an array as for collectives, `peer` a rank (also this one), and `tag` 0 to 32511. Wrong arguments
    raise in the call itself. Messages to one rank with one tag arrive in the order in which they were sent. Several threads may
    send and receive at the same time if each uses its own tags.
    """

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
        _wire: str = EXACT,
    ) -> None:
        """`_memory`: the node memory of another communicator of the same ranks. `_name`: this communicator's name in reports.

        `_wire`: the format of data between nodes.
        """
        # These imports start MPI, so they are not at the top.
        from mpi4py import MPI

        from collectives.transports.gpu.device import Devices
        from collectives.transports.gpu.device_messages import reach
        from collectives.transports.mpi import library_version, message, ranks_of_job

        self.mpi = keep(mpi)
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self.checked = bool(switch("MPITRAIN_DEBUG")) if checked is None else checked
        self._library_version = library_version
        ranks, progress = ranks_of_job(mpi), progress or Deferred()
        table = built_in() if table is None else table
        log, issues = Log(ranks, _name), None
        if not progress.on_thread:
            issues = Issues(mpi, Log(ranks, f"{_name} async_op".strip()), checked=self.checked)
        self._recorder = Recorder(mpi, log, checked=self.checked)
        self._queue = AsyncQueue(progress, issues)
        self._groups = Groups(log)
        self._plans = Plans()
        # Communicators that this one has made for itself, in the same order on all ranks: they get its table and are freed with it.
        self._relatives: list[Communicator] = []
        self._twin: Communicator | None = None  # the relative that the progress thread uses
        self._auto_wire: str | None = None  # the network format that "auto" has chosen
        of_node: Transports | NodeMemory
        if _is_node:
            self.node: Communicator = self
            grid, of_node = [list(range(self.size))], _memory or NodeMemory(mpi)
        else:
            self.node = Communicator(
                mpi.Split_type(MPI.COMM_TYPE_SHARED),
                progress=progress,
                checked=self.checked,
                table=table,
                _is_node=True,
                _memory=_memory,
                _name=f"{_name} node".strip(),
            )
            self._relatives.append(self.node)
            grid, of_node = ranks_by_node(mpi, self.node.mpi), self.node._transports
        self._transports: Transports = Transports(mpi, grid, table, of_node=of_node, across=self._across, wire=_wire)
        self.nodes: Sequence[Sequence[int]] = grid
        self.placement = self._transports.placement
        self.num_nodes = self.placement.num_nodes
        memory = self._transports.memory
        # An address may change from private to node memory, or back.
        on_change(self._plans.forget)
        self._devices = Devices(
            mpi,
            placement=self.placement,
            away=self._transports.away,
            recorder=self._recorder,
            flush=self._queue.flush,
            wire=lambda: self._transports.selector.wire,
        )
        self._dispatch: Dispatch = Dispatch(
            rank=self.rank,
            size=self.size,
            recorder=self._recorder,
            queue=self._queue,
            groups=self._groups,
            transports=self._transports,
            devices=self._devices,
            plans=self._plans,
            on_progress=lambda: self._on_progress()._dispatch,
        )
        self._collectives = Collectives(self._dispatch)
        self._messages = Messages(
            mpi, log=log, queue=self._queue, groups=self._groups, checked=self.checked, describe=message, reach=reach
        )
        self._control = Control(
            mpi,
            recorder=self._recorder,
            queue=self._queue,
            transports=self._transports,
            on_progress=lambda: self._on_progress()._control,
        )
        self._allocation = Allocation(memory, recorder=self._recorder, queue=self._queue)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Communicator":
        """The same group: a copy of an object that holds a communicator, such as a model, is on the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, num_nodes={self.num_nodes})"

    # Groups of ranks

    @overload
    def split(self, color: SupportsIndex, key: SupportsIndex = 0) -> "Communicator": ...

    @overload
    def split(self, color: None, key: SupportsIndex = 0) -> None: ...

    @overload
    def split(self, color: SupportsIndex | None, key: SupportsIndex = 0) -> "Communicator | None": ...

    def split(self, color: SupportsIndex | None, key: SupportsIndex = 0) -> "Communicator | None":
        """A communicator of the ranks that pass the same `color` (0 to 2147483647), ordered by (`key`, rank here). Collective.

        A rank that passes None as `color` joins no new communicator and gets None.
        """
        from mpi4py import MPI

        color, key = color_and_key(color, key)
        self._queue.flush()
        with self._recorder.enter("split"):
            if color is None:
                self.mpi.Split(MPI.UNDEFINED, key)
                return None
            return self._like_this(self.mpi.Split(color, key))

    @property
    def is_freed(self) -> bool:
        """Whether `free` was called."""
        return self._queue.is_freed

    def free(self) -> None:
        """Free the MPI communicators of this communicator and its `node`. Collective; the garbage collector never does this.

        Waits for all unfinished operations and messages. If the world was freed, `collectives.world()` makes a new one.
        """
        if isinstance(self._queue.progress, Freed):  # also in a forked child, which has nothing to free
            return
        self._messages.in_flight.finish()
        self._queue.progress.drain()
        for other in reversed(self._relatives):
            other.free()
        with self._recorder.log.enter("free"):
            self._devices.free()
            self._transports.free()
            self._queue.free()
            self.mpi.Free()
        self._plans.forget()

    def _like_this(
        self, mpi: Any, *, _memory: NodeMemory | None = None, _name: str = "", wire: str | None = None
    ) -> "Communicator":
        """A Communicator with the settings of this one, for `mpi`: an mpi4py communicator of some or all of its ranks."""
        made = Communicator(
            mpi,
            progress=self._queue.progress.of_process,
            checked=self.checked,
            table=self.table,
            _memory=_memory,
            _name=_name,
            _wire=self._transports.wire if wire is None else wire,
        )
        made._auto_wire = self._auto_wire
        return made

    def _on_progress(self) -> "Communicator":
        """The communicator that carries out asynchronous operations: this one, or its twin for the progress thread."""
        if not self._queue.progress.on_thread:
            return self
        if self._twin is None:
            with self._recorder.enter("preparing asynchronous operations"):
                self._twin = self._like_this(self.mpi.Dup(), _memory=self.node._transports.memory)
            self._relatives.append(self._twin)
        return self._twin

    def _across(self) -> Transports:
        """The transports between this rank and the ranks of the same local number on the other nodes. Collective."""
        node = next(node for node, ranks in enumerate(self.nodes) if self.rank in ranks)
        across = self._like_this(self.mpi.Split(self.node.rank, node), wire=EXACT)
        self._relatives.append(across)
        return across._transports

    # The format of data between nodes (docs/network.md)

    def with_wire(self, wire: str | Mapping[str, str]) -> "Communicator":
        """A communicator of the same ranks that sends fp32, bf16 and fp16 elements between nodes in a smaller format. Collective.

        `wire`: "fp32" (elements as they are), "bf16", "fp16", "int8", "fp8" or "auto", which measures, and takes int8 where it is much
        faster, else fp32. `{"node": "fp32", "network": "int8"}` means the same as "int8". The format applies to sums and averages by
        `all_reduce` and `reduce_scatter` and to `all_gather`, with `algorithm` "encoded", and with "auto" if the array has more than
        1,024 elements for each rank. The new communicator shares the node memory of this one, and is freed with it; its splits keep
        the format. ValueError on all ranks for an unknown format, or if the ranks ask for different ones.
        """
        self._queue.flush()
        with self.together("with_wire"):
            network = wires.network_format(wire)
        if any(other != network for other in self.all_gather_object(network)):
            with self.together("with_wire"):
                raise ValueError(
                    f"the network format is {network!r} here, but not on all ranks; ask for the same on every rank"
                )
        is_auto = network == wires.AUTO
        with self._recorder.enter("with_wire"):
            made = self._like_this(
                self.mpi.Dup(),
                _memory=self.node._transports.memory,
                _name=f"{self._recorder.log.name} with_wire {network}".strip(),
                wire=wires.SMALL if is_auto else network,
            )
        self._relatives.append(made)
        transports = made._transports
        why_not = transports.selector.why_not("all_reduce", "encoded", dtype=TABLE["float32"], nbytes=0, op="sum")
        if why_not is None:
            wires.load_codec(self.node)
            if is_auto:
                self._auto_wire = made._auto_wire = self._auto_wire or wires.measured(made)
                transports.use(made.table, self._auto_wire)
            return made
        if network != EXACT and self.num_nodes > 1 and self.rank == 0:
            level = logging.INFO if is_auto else logging.WARNING
            _log.log(level, "wire %r: elements are sent between nodes as they are: 'encoded' %s", network, why_not)
        if is_auto:
            transports.use(made.table, EXACT)
        return made

    @property
    def wire(self) -> dict[str, str]:
        """The formats that are used: `{"node": "fp32", "network": format}`; "fp32" where "encoded" cannot work, such as on one node."""
        return {"node": EXACT, "network": self._transports.selector.wire}

    # The choice of algorithms

    @property
    def table(self) -> Table:
        """The table from which "auto" chooses: measured by `python -m collectives tune`, else built in. `table.to_dict()` fits JSON."""
        return self._transports.table

    def use_table(self, table: Table | Mapping[str, Any]) -> None:
        """Let "auto" choose from `table` (a Table or the result of its `to_dict`) here, on `node` and on later splits. Collective.

        ValueError on all ranks if `table` is not a valid table, or differs between the ranks.
        """
        self._queue.flush()
        if self.has_progress_thread:
            self._queue.progress.drain()  # operations issued earlier use the old table, on every rank
        self._recorder.enter("use_table").leave()
        with self.together("use_table"):
            new = Table.from_dict(table.to_dict() if isinstance(table, Table) else table)
        with self._recorder.log.enter("use_table", root=0):
            first = self.mpi.bcast(new.to_dict())
        with self.together("use_table"):
            if new.to_dict() != first:
                raise ValueError("the table differs from rank 0's; pass the same on every rank")
        self._take(new)

    def _take(self, table: Table) -> None:
        self._transports.use(table, self._transports.wire)
        self._plans.forget()
        for other in self._relatives:
            other._take(table)

    def algorithms(self, operation: str, dtype: DType = TABLE["float32"], nbytes: int = 0) -> tuple[str, ...]:
        """The values of `algorithm` besides "auto" that work on these ranks, for arrays of this dtype and size in host memory."""
        return tuple(self._transports.selector.feasible(operation, dtype=dtype, nbytes=nbytes))

    def machine(self) -> dict[str, Any]:
        """The machine on which measurements with this communicator are valid: MPI library, CPU, cores, ranks on a node, nodes."""
        return table_cache.this_machine(self._library_version(), self.placement)

    @property
    def reads_peers(self) -> bool:
        """Whether the kernel lets these ranks, all on one node, read each other's private memory."""
        shared = self._transports.shared
        return shared is not None and shared.reads_private

    @property
    def hidden_s(self) -> float:
        """Seconds in which this process has communicated while its callers computed, so far, on all communicators. 0 without a progress
        thread; NCCL's operations on a GPU are not counted."""
        return self._queue.progress.of_process.hidden_s

    @property
    def has_progress_thread(self) -> bool:
        """Whether a progress thread carries out asynchronous operations while the caller computes."""
        return self._queue.progress.on_thread

    def overlaps(self, *, on_device: bool = False) -> bool:
        """Whether an asynchronous collective makes progress while the caller computes. The same on all ranks.

        In host memory this needs a progress thread; in GPU memory (`on_device`) NCCL, which is chosen in the first collective there.
        """
        return self._devices.by_nccl if on_device else self._queue.progress.on_thread


# Functions for other modules of this package that make communicators.


def take_table(comm: Communicator, table: Table) -> None:
    """`use_table` without a check between the ranks, for a table that is known to be the same on all of them."""
    comm._take(table)


def for_callbacks(comm: Communicator, name: str, in_front: Callable[[Progress], Progress]) -> Communicator:
    """A communicator of the same ranks for collectives that the library `name` runs in callbacks on its own threads. Collective.

    It is freed with `comm`. `in_front(progress)` returns a Progress that replaces the Progress of `comm` and passes calls on to it.
    """
    comm._queue.flush()
    with comm._recorder.enter(f"preparing collectives in {name}"):
        own = Communicator(
            comm.mpi.Dup(),
            progress=Deferred(),  # the Progress of `comm` belongs to the caller's thread
            checked=comm.checked,
            table=comm.table,
            _wire=comm._transports.wire,
            _name=f"{comm._recorder.log.name} in {name}".strip(),
        )
    comm._relatives.append(own)
    comm._queue.progress = in_front(comm._queue.progress)
    return own
