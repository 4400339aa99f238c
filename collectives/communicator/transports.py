"""The transports of a communicator for arrays in host memory, each made at its first use, and the choice between them."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from collectives.arrays.dtypes import DType
from collectives.selection.selector import EXACT, WITHIN_NODE, Placement, Selector
from collectives.selection.table import Table
from collectives.transports.node.mappings import is_shared
from collectives.transports.node.memory import NodeMemory, say_short
from collectives.transports.node.shared import Shared
from collectives.transports.node.staged import Staged
from collectives.transports.transport import Planner, Transport
from collectives.transports.two_level import TwoLevel

if TYPE_CHECKING:  # importing it starts MPI
    from collectives.transports.encoded import Encoded


class Transports:
    """The transports of the ranks of `mpi`. `grid[k]`: the ranks on node k, in order; `placement`: the number of ranks on each node.

    `node_memory`: of this rank's node. `memory`: the same; None on several nodes. `shared`: the transport through `memory`; None also
    if that cannot be allocated.
    `on_node`: the `shared` of this rank's node; None on all ranks if a node has none.
    `away`: the ranks on other nodes. `table`: the table from which "auto" chooses; `wire`: the format of data between nodes; `selector`
    makes the choice.
    """

    def __init__(
        self,
        mpi: Any,
        grid: Sequence[Sequence[int]],
        table: Table,
        *,
        of_node: "Transports | NodeMemory",
        across: Callable[[], "Transports"],
        wire: str = EXACT,
    ) -> None:
        """Collective. `of_node`: the transports of this rank's node; for the communicator of a node itself, its NodeMemory.

        `across()`: the transports between the ranks of this rank's local number, which send elements as they are. It is collective and
        called once at most.
        """
        # These imports start MPI, so they are not at the top.
        from collectives.transports.executor import Executor
        from collectives.transports.mpi import Library
        from collectives.transports.scheduled import Scheduled

        self._mpi, self.grid, self._across = mpi, grid, functools.cache(across)
        self.placement = Placement.of([len(ranks) for ranks in grid])
        self.away = frozenset(rank for ranks in grid if mpi.rank not in ranks for rank in ranks)
        self._executor = Executor(mpi, away=self.away)
        self._schedule = partial(Scheduled, self._executor, rank=mpi.rank, size=mpi.size)
        library = Library(mpi, is_shared=is_shared)
        self._made: dict[str, Transport] = {"mpi": library}  # by algorithm
        self._planners: dict[str, Planner] = {"mpi": library}
        self._infeasible: dict[str, str] = {}  # algorithms that cannot run on these ranks, and the reason
        self.memory: NodeMemory | None = None
        self.node_memory: NodeMemory
        self.shared: Shared | None = None
        self.on_node: Shared | None = None
        if isinstance(of_node, NodeMemory):
            self.memory = self.node_memory = of_node
            self._share(of_node)
        else:
            self._join(of_node)
        self.use(table, wire)

    def _share(self, memory: NodeMemory) -> None:
        """Make the transports through node memory. If that cannot be allocated, log it: the other transports still work."""
        try:
            staged = Staged(self._mpi)
            self.shared = self.on_node = Shared(self._mpi, memory, staged)
            self._made |= {"staged": staged, "shared": self.shared}
            self._planners |= {"staged": staged, "shared": self.shared}
        except OSError as error:
            self._infeasible |= dict.fromkeys(WITHIN_NODE, str(error))
            say_short(self._mpi.rank, "collectives on this node go through MPI instead of its memory", error)

    def _join(self, node: "Transports") -> None:
        """Use the transports of this rank's node, on a communicator that may span several nodes."""
        self.on_node, self.node_memory = node.shared, node.node_memory
        if len(self.grid) == 1:
            self.memory, self.shared = node.memory, node.shared
            self._infeasible |= node._infeasible
            self._made |= {name: of for name, of in node._made.items() if name in WITHIN_NODE}
            self._planners |= {name: of for name, of in node._planners.items() if name in WITHIN_NODE}
        elif not all(self._mpi.allgather(node.shared is not None)):
            through_memory = ["two_level"] if self.placement.largest_node == 1 else ["two_level", "encoded"]
            self._infeasible |= dict.fromkeys(through_memory, "a node has no memory to share, see the log")
            self.on_node = None

    def use(self, table: Table, wire: str) -> None:
        """Let "auto" choose from `table` and for the format `wire`, which are the same on all ranks."""
        self.table, self.wire = table, wire
        self._made.pop("encoded", None)  # it has the format, and memory for it
        self.selector = Selector(table, self.placement, self._infeasible, wire)

    def of(self, algorithm: str) -> Transport:
        """The Transport of an algorithm that is feasible here.

        The first use of "two_level" and of "encoded" is collective, as their operations are.
        """
        if algorithm not in self._made:
            # Two transports have only some of the operations; the selector chooses them for those only.
            if algorithm == "two_level":
                assert self.on_node is not None
                two_level = TwoLevel(self.grid, self._mpi.rank, self.on_node, self._across().chosen)
                self._made[algorithm] = cast(Transport, two_level)
            elif algorithm == "encoded":
                self._made[algorithm] = cast(Transport, self._encoded())
            else:
                self._made[algorithm] = self._schedule(algorithm)
        return self._made[algorithm]

    def _encoded(self) -> "Encoded | TwoLevel":
        from collectives.transports.encoded import Encoded

        if self.placement.largest_node == 1:
            return Encoded(self._mpi, self.wire)
        assert self.on_node is not None
        across = Encoded(self._across()._mpi, self.wire)
        return TwoLevel(self.grid, self._mpi.rank, self.on_node, lambda *_: across, divides_twice=True)

    def memory_of(self, operation: str, flat: np.ndarray) -> str:
        """The selector's word (one of MEMORIES) for the memory of `flat`, the first array of a call of `operation`."""
        # On several nodes only an all-gather's choice depends on it.
        memory = self.node_memory if operation == "all_gather" else self.memory
        number = 0 if memory is None or memory.holds_none else memory.find(flat)[0]
        if memory is not None and number and (operation != "all_gather" or memory.is_one_array(number)):
            return "node"
        return "private"

    def planner(self, algorithm: str) -> Planner | None:
        """The transport that plans calls of `algorithm`, or None."""
        return self._planners.get(algorithm)

    def chosen(self, operation: str, dtype: DType, nbytes: int) -> Transport:
        """The Transport that "auto" chooses for arrays in private memory."""
        return self.of(self.selector.choose(operation, "auto", dtype=dtype, nbytes=nbytes))

    def free(self) -> None:
        """Release the node memory and MPI's persistent requests."""
        self._made.clear()
        self._planners.clear()
        self.shared = self.on_node = None
        self._executor.free()


def ranks_by_node(mpi: Any, node: Any) -> list[list[int]]:
    """The ranks of `mpi` on each node, in order. Collective. `node`: mpi4py's communicator of the ranks on this rank's node."""
    by_leader: dict[int, list[int]] = {}
    for rank, leader in enumerate(mpi.allgather(node.bcast(mpi.rank))):
        by_leader.setdefault(leader, []).append(rank)
    return list(by_leader.values())
