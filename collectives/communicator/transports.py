"""The transports of a communicator for arrays in host memory, each made at its first use, and the choice between them."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from collectives.arrays.dtypes import DType
from collectives.selection.selector import WITHIN_NODE, Placement, Selector
from collectives.selection.table import Table
from collectives.transports.node.memory import NodeMemory
from collectives.transports.node.shared import Shared
from collectives.transports.node.staged import Staged
from collectives.transports.transport import Planner, Transport
from collectives.transports.two_level import TwoLevel

_log = logging.getLogger("collectives")


class Transports:
    """The transports of the ranks of `mpi`. `grid[k]`: the ranks on node k, in order; `placement`: the number of ranks on each node.

    `memory`: the node memory; None on several nodes. `shared`: the transport through `memory`; None also if that cannot be allocated.
    `table`: the table from which "auto" chooses; `selector` makes the choice.
    """

    def __init__(
        self,
        mpi: Any,
        grid: Sequence[Sequence[int]],
        table: Table,
        *,
        of_node: "Transports | NodeMemory",
        across: Callable[[], "Transports"],
    ) -> None:
        """Collective. `of_node`: the transports of this rank's node; for the communicator of a node itself, its NodeMemory.

        `across()`: the transports between the ranks of this rank's local number. It is collective and called once at most.
        """
        # These imports start MPI, so they are not at the top.
        from collectives.transports.executor import Executor
        from collectives.transports.mpi import Library
        from collectives.transports.scheduled import Scheduled

        self._mpi, self._grid, self._across = mpi, grid, across
        self.placement = Placement.of([len(ranks) for ranks in grid])
        self._executor = Executor(mpi)
        self._schedule = partial(Scheduled, self._executor, rank=mpi.rank, size=mpi.size)
        library = Library(mpi)
        self._made: dict[str, Transport] = {"mpi": library}  # by algorithm
        self._planners: dict[str, Planner] = {"mpi": library}
        self._infeasible: dict[str, str] = {}  # algorithms that cannot run on these ranks, and the reason
        self.memory: NodeMemory | None = None
        self.shared: Shared | None = None
        self._on_node: Shared | None = None  # the `shared` of this rank's node
        if isinstance(of_node, NodeMemory):
            self.memory = of_node
            self._share(of_node)
        else:
            self._join(of_node)
        self.use(table)

    def _share(self, memory: NodeMemory) -> None:
        """Make the transports through node memory. If that cannot be allocated, log it: the other transports still work."""
        try:
            staged = Staged(self._mpi)
            self.shared = self._on_node = Shared(self._mpi, memory, staged)
            self._made |= {"staged": staged, "shared": self.shared}
            self._planners |= {"staged": staged, "shared": self.shared}
        except OSError as error:
            self._infeasible |= dict.fromkeys(WITHIN_NODE, str(error))
            if self._mpi.rank == 0:
                _log.warning("collectives on this node go through MPI instead of its memory: %s", error)

    def _join(self, node: "Transports") -> None:
        """Use the transports of this rank's node, on a communicator that may span several nodes."""
        self._on_node = node.shared
        if len(self._grid) == 1:
            self.memory, self.shared = node.memory, node.shared
            self._infeasible |= node._infeasible
            self._made |= {name: of for name, of in node._made.items() if name in WITHIN_NODE}
            self._planners |= {name: of for name, of in node._planners.items() if name in WITHIN_NODE}
        elif not all(self._mpi.allgather(node.shared is not None)):
            self._infeasible["two_level"] = "a node has no memory to share, see the log"

    def use(self, table: Table) -> None:
        """Let "auto" choose from `table`, which is the same on all ranks."""
        self.table = table
        self.selector = Selector(table, self.placement, self._infeasible)

    def of(self, algorithm: str) -> Transport:
        """The Transport of an algorithm that is feasible here. The first use of "two_level" is collective, as its operations are."""
        if algorithm not in self._made:
            if algorithm == "two_level":
                assert self._on_node is not None
                two_level = TwoLevel(self._grid, self._mpi.rank, self._on_node, self._across().chosen)
                # TwoLevel has only some of the operations; the selector chooses it for those only.
                self._made[algorithm] = cast(Transport, two_level)
            else:
                self._made[algorithm] = self._schedule(algorithm)
        return self._made[algorithm]

    def memory_of(self, operation: str, flat: np.ndarray) -> str:
        """The selector's word (one of MEMORIES) for the memory of `flat`, the first array of a call of `operation`."""
        number = 0 if self.memory is None or self.memory.holds_none else self.memory.find(flat)[0]
        if number and (operation != "all_gather" or self.memory.is_one_array(number)):  # type: ignore[union-attr]
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
        self.shared = self._on_node = None
        self._executor.free()
