"""The state that the forwards and the backwards of one sharded model share: its phase, and which units are unsharded."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import nn

from collectives import Communicator
from mpitrain.placement.parts import stage_of
from mpitrain.plans.draws import mark_places
from mpitrain.sharding.ranks import DataParallelRanks, is_within
from mpitrain.sharding.slices.buffers import SliceBuffers
from mpitrain.sharding.step.calls import GradientPlace, Reruns, UnitCall, free_calls
from mpitrain.sharding.step.changes import Fence, FullWrites, Tree
from mpitrain.sharding.step.checks.same_inputs import SameInputs
from mpitrain.sharding.step.gathers import Gathers, Prefetch
from mpitrain.sharding.step.reducer import Reducer
from mpitrain.sharding.step.route import Route
from mpitrain.sharding.unit.parameter import ShardedParameter
from mpitrain.sharding.unit.unit import Unit, UnitState, unit_of
from mpitrain.torch_glue.torch_internals import outdate, writes_to_each

_NUM_KEPT = 16
"""The number of writes after which calls are freed, even if their parameters were not written."""


class Phase(Enum):
    """The pass that a model is in."""

    IDLE = "shards may be written"
    FORWARD = "forward"
    BACKWARD = "backward"


class Graph(Enum):
    """Whether full parameters stay for the graph of a backward: see [Note: second derivatives]."""

    NONE = "no backward has made a graph"
    LIVE = "a backward made a graph, and full parameters stay"
    USED = "another backward has ended since: the next forward gives the full parameters back"


class StepState:
    """The units under one outermost module, `root`, and what their forwards and backwards share."""

    def __init__(self, root: nn.Module, units: list[Unit], ranks: DataParallelRanks) -> None:
        whole = ranks.data_parallel
        for part in (unit.ranks.data_parallel for unit in units):
            if not is_within(part, whole):
                raise ValueError(
                    f"a part of a model is sharded over {part.size} ranks that are not all among the {whole.size} ranks "
                    "of the whole; pass the mesh of the whole, or another mesh of the same ranks"
                )
        self.ranks = ranks
        self.units = units
        self.phase = Phase.IDLE
        self.comm_s = 0.0
        """Seconds that were spent in communication and in waits for other ranks."""
        self.num_backwards = 0
        """The backwards so far. With slices: the rounds, see [Note: rounds] in reducer.py."""
        self._tree = Tree(root)
        self._graph = Graph.NONE
        self._makes_graph = False  # whether this backward makes a graph
        self._held: set[Unit] = set()  # units that stay full until `end_hold`
        self._running: set[Unit] = set()  # units whose modules' calls have not returned
        self._ran: set[Unit] = set()  # units whose modules ran in this forward, or in the last one
        self.places: dict[int, GradientPlace] = {}
        """Where the gradient of a full parameter belongs, by the `id` of the parameter."""
        self._routes: list[Route] = []  # of the backward under way, and of backwards within it
        self._reruns = Reruns()
        self.num_around = 0
        """The backwards around the innermost one under way, also those through no call of this model."""
        self._writes = -1  # the count of writes to the shards when they were noticed last
        self._earlier_writes = deque([0], maxlen=_NUM_KEPT)  # such counts before
        self._writes_of: dict[ShardedParameter, int] = {}  # the same of each parameter
        # The count of all writes when one to this parameter was noticed.
        self._written: dict[ShardedParameter, int] = {}
        self._used: dict[nn.Module, frozenset[ShardedParameter]] = {}  # parameters by the modules that may use them
        self._lasting = [unit for unit in units if unit.lasts]
        self._passing = [unit for unit in units if not unit.lasts]
        self._compares = bool(self._passing) and ranks.shard.size > 1
        # The message at the end of a backward compares, too, unless the ranks that it reaches have several copies of the model.
        self._compares_at_end = self._compares and not ranks.has_replicas
        self._is_reach_checked = not self._compares
        self._watched: set[tuple[str, bool, bool]] = set()  # kinds of outermost forwards
        limit = units[0].prefetch_bytes
        self._prefetch = Prefetch(max((unit.nbytes for unit in units[1:]), default=0) if limit is None else limit)
        self._gathers = Gathers(units)
        self._params = [param for unit in units for param in unit.params]
        self._shards = [param.shard for param in self._params]
        shared = any(flat.storage.kind == "resident" for unit in units for flat in unit.flats)
        readers = (
            ranks.shard if all(is_within(unit.ranks.shard, ranks.shard) for unit in units) else ranks.data_parallel
        )
        self._full_writes = FullWrites(units)
        self._fence = Fence(
            readers.node if shared and readers.node.size > 1 else None,
            [param.shard for unit in self._lasting for param in unit.params],
        )
        self.reducer = Reducer(units)
        self._inputs: SameInputs | None = SameInputs(
            root, says=ranks.everyone.rank == 0
        )  # until they have been compared
        slices = units[0].slices
        self._slice_buffers = None if slices is None else SliceBuffers(root, slices, whole)
        if slices is not None and stage_of(root) is None:
            mark_places(root)

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Count the time of the block as communication."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.comm_s += time.perf_counter() - start

    def _module_of(self, unit: Unit) -> nn.Module:
        return next(module for module in self._tree.module.modules() if unit_of(module) is unit)

    def _notice_writes(self) -> None:
        """After writes to shards, let autograd refuse each earlier forward's backward that has saved these parameters."""
        counts = writes_to_each(self._shards)
        if (writes := sum(counts)) == self._writes:
            return
        of_params = dict(zip(self._params, counts, strict=True))
        if self._writes_of:
            written = [param for param, count in of_params.items() if count != self._writes_of[param]]
            outdate([param.full for param in written])
            if self._running:  # a backward within a forward
                self._full_writes.begin()
            self._written |= dict.fromkeys(written, writes)
            self._reruns.reset()
        before = self._writes
        self._earlier_writes.append(before)
        self._writes, self._writes_of = writes, of_params
        # Calls of the last step stay, to refuse their backward. So do those whose parameters were not written, for parts that are
        # trained in turns: steps of one come before the backward of the other one.
        oldest = self._earlier_writes[0]
        free_calls(self, lambda it: it.writes < oldest or (it.writes < before and self._is_outdated(it)))

    def _is_outdated(self, call: UnitCall) -> bool:
        """Whether a parameter that the module of a call may have used was written since."""
        unit = call.unit
        if call.writes == self._writes or unit is None:
            return False
        called = self._module_of(unit) if call.entry is None else call.entry
        if called not in self._used:
            inside = set(called.modules())
            self._used[called] = frozenset(
                param for param in self._params if any(module in inside for module, _ in param.users)
            )
        return any(self._written.get(param, 0) > call.writes for param in self._used[called])

    def _unshard(self, unit: Unit) -> None:
        """Fill the full parameters of a unit and show them. Collective unless they are already full."""
        if unit.state is UnitState.UNSHARDED:
            return
        with self._communicating():
            gathered = unit.unshard()
        if gathered and not unit.lasts:
            self._gathers.note(unit)
            self._prefetch.used(unit)

    def _reshard(self, unit: Unit, *, keep: bool = False, for_backward: bool = False) -> None:
        """Show the shards of a unit, and free its full parameters unless a graph, `keep` or `begin_hold` needs them."""
        if unit in self._held or unit in self._running:
            return  # a backward within a forward leaves alone what the forward still uses
        if unit.state in (UnitState.SHARDED, UnitState.UNSHARDING):
            return  # the prefetch itself frees units that it began to gather
        if keep or self._graph is not Graph.NONE:
            unit.hide()
        else:
            unit.reshard(for_backward=for_backward)

    def _trained_together(self, ranks: DataParallelRanks) -> Communicator:
        """The ranks that average their gradients."""
        return ranks.data_parallel if self.units[0].sync_copies else ranks.within

    def end_fence(self) -> None:
        """Called before shards are returned to the user or written: see [Note: fence put off] in changes.py. Not collective."""
        self._fence.end()

    def end_graph(self) -> None:
        """Free full parameters that stayed for a graph: see [Note: second derivatives]."""
        if self._graph is not Graph.NONE and self.phase is Phase.IDLE:
            self._graph = Graph.NONE
            for unit in self._passing:
                unit.reshard()

    def before_writes(self, params: Iterable[torch.Tensor], doing: str) -> None:
        """Called before `doing`, such as an optimizer's step, writes shards.

        RuntimeError within a forward, which would go on with the old full parameters, and if gradients of `params` are not reduced.
        """
        params = list(params)
        if self._running and not {id(param) for param in params}.isdisjoint(map(id, self._shards)):
            raise RuntimeError(
                f"{doing} within a forward or a registered method of the model ({next(iter(self._running)).name}), where parameters "
                "are full and must not change. Register only methods that compute, such as a loss; a method that takes steps calls the "
                "model or those methods, and needs no registration itself"
            )
        self.end_fence()
        self.reducer.check_reduced(params, doing)
        if self._graph is not Graph.NONE:
            own = {id(shard) for shard in self._shards}
            if any(id(param) in own for param in params):
                self.end_graph()

    def end_pass(self, *, before_backward: bool = False, is_compared: bool = False) -> None:
        """Called after the outermost forward, and after a backward. `before_backward`: a backward may follow. `is_compared`: the ranks
        have compared the order of their gathers."""
        with self._communicating():
            self._prefetch.end()
        for unit in self._lasting:
            if unit.state is UnitState.UNSHARDING:
                self._unshard(unit)
            if unit not in self._held and not self._running:
                unit.reshard()
        # A backward may have run within a forward, or while parameters are held.
        self.phase = Phase.FORWARD if self._held or self._running else Phase.IDLE
        if before_backward:
            self._fence.begin()
            return
        with self._communicating():
            if self._compares and not is_compared:
                # Compare within the shard group only: another copy of the model may run other modules.
                order = torch.tensor(self._gathers.both_ways(), dtype=torch.uint8)
                self.ranks.shard.all_reduce(order, "max")
                self._check_gathers(order)
            self._fence.wait()

    def _check_gathers(self, most: torch.Tensor) -> None:
        try:
            self._gathers.check(most)
        except RuntimeError:
            self.abandon()
            self._prefetch.reset()
            raise

    def abandon(self) -> None:
        """Back to idle after an exception in the middle of a step. No communication: the ranks may be anywhere."""
        self._graph = Graph.NONE
        self.reducer.reset_rounds()
        if self._slice_buffers is not None:
            self._slice_buffers.abandon()
        for unit in self.units:
            unit.abandon()
        self._watched.clear()
        self._reruns.reset()
        self._prefetch.abandon()
        self._gathers.reset()
        self.phase = Phase.IDLE
        self._fence.abandon()
