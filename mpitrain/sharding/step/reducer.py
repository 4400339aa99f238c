"""The reductions of a backward: their order, their buffers, and their overlap with the computation.

[Note: complete] A unit is complete when a backward has computed all its gradients: autograd has accumulated the gradient of each
parameter that the backward reaches, which it does once in a backward. The route of the backward (route.py) tells which these are;
without it, they are all that are trained. A unit whose full parameters do not last must also have passed all its exits, because they
are freed then. If a backward runs other backwards within itself ([Note: reruns] in calls.py), a gradient may come several times; then
the unit is complete when the module has run again as often as in the forward. At the end of the backward every unit is complete.

[Note: order] Reductions are collective, so all ranks issue them in one order: the reverse of the modules' order. A complete unit waits
for the units before it in this order. A unit that this rank did not use is reduced, as zeros, at the end of the backward.

[Note: agreement] The user trains or freezes a parameter by its flag `requires_grad` on each rank, but a reduction needs all ranks. So
if parameters are frozen, a forward that records a graph begins with one byte from each rank: whether the user has thawed some of them.
If so, the ranks compare the thawed parameters, and reduce their gradients from this step on. A parameter that is frozen later stays in
the order, as zeros. So freezing and thawing in turn, as in adversarial training, costs nothing.

[Note: gradient buffers] The unit that is next in order moves each gradient into a buffer as soon as autograd has computed it, while the
gradient is in the core's cache. Any other unit keeps its gradients where autograd put them until its turn comes (for example the root's
head, whose gradient comes first and is reduced last). So a buffer never holds gradients of two units. Two buffers take turns: while the
gradients of one unit are reduced, the gradients of the next unit go into the other buffer. Without a progress thread a reduction
progresses whenever a gradient comes. Before the next reduction begins, the rank waits for the end of this one. So a rank that is less
than one unit ahead of the other ranks does not wait. Only gradients that are sums over `tp` ranks are added up first, with these ranks.

[Note: rounds of stages] In a pipeline with slices a backward is of one stage. It reduces the gradients of this stage alone, because
each stage has rounds of its own. The first half of a backward that is divided reduces nothing.

[Note: rounds] With slices a backward is a round of the step, and each reduction adds its gradients to the sums. A backward that
computes no gradient of a parameter is no round, as that of `torch.autograd.grad` for inputs: it reduces nothing. So reductions begin
only when the first gradient has come. Of stages it is known which backwards are rounds.

[Note: compressed] With `compress_gradients` the average over copies of the model comes last, after the end of the backward and after
the ranks have found the parameters that none has used: `compress`. Until then full gradients stay where autograd put them.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from collectives import Communicator
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.step.route import Expected
from mpitrain.sharding.unit.flat import FlatParameters
from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.host_arrays import gradient_buffers, host_arrays
from mpitrain.sharding.unit.unit import Unit


class _Turn:
    """What a backward reduces. `order`: the gradients, in the order of their reductions, each with its unit."""

    def __init__(self, units: Sequence[Unit], order: Sequence[tuple[Unit, Gradients]]) -> None:
        self.order = order
        self.places = {gradients: place for place, (_, gradients) in enumerate(order)}
        self.trained: dict[Unit, set[tuple[Gradients, int]]] = {unit: set() for unit in units}
        """The parameters whose gradients come."""
        for unit, gradients in order:
            self.trained[unit] |= {(gradients, index) for index in range(len(gradients.params))}


class Reducer:
    """The reductions of one model. `units`: in the order of its modules. Making it is collective."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.compression = next((unit.compression for unit in units if unit.compression is not None), None)
        self.done: list[Gradients] = []
        """The gradients whose reduction has begun in this backward."""
        self.has_missed = False
        """Whether some parameters of a unit got no gradient in a backward that expected those of all."""
        self.gradients: list[tuple[Unit, Gradients]] = []
        """All gradients that are reduced, in the order in which they were added: an index of this list stays valid."""
        self._complete: set[Unit] = set()
        self._turns: dict[tuple[int, ...] | None, _Turn] = {}  # by stages
        # Parameters whose gradients have not come in this backward.
        self._missing: dict[Unit, set[tuple[Gradients, int]]] = {}
        self._turn = _Turn([], [])  # what this backward reduces
        self._expects_all = True
        self._next = 0  # index, in the turn, of the gradients to reduce next
        self.stages: tuple[int, ...] | None = None
        """The stages of a pipeline whose gradients the next backwards reduce; None: all. See [Note: rounds of stages]."""
        self._left_some = False  # whether this backward skipped a reduction, under `no_sync`
        self.waits = False
        """Whether full gradients of backwards under `no_sync` wait for their reduction."""
        self.is_pending = False
        """With slices: whether this backward has computed no gradient of a parameter so far: see [Note: rounds]."""
        self.reducing: Gradients | None = None
        """The gradients whose reduction has begun and has not ended."""
        # The buffers, in host memory. The first one is free.
        self._buffers: dict[tuple[Communicator, torch.dtype], deque[torch.Tensor]] = {}
        self._take_order()

    def _take_order(self) -> None:
        self.order = [
            (unit, gradients)
            for unit in reversed(self.units)
            for flat in unit.flats
            for gradients in flat.gradients
            if not gradients.is_lent
        ]
        # Parameters whose gradients are not reduced, the same on all ranks.
        self.frozen = [(flat, index) for unit in self.units for flat in unit.flats for index in flat.frozen]
        self.gradients += [each for each in self.order if each not in self.gradients]
        self._turns.clear()
        self._allocate()

    def _allocate(self) -> None:
        """Allocate two buffers per dtype, with the length of its longest gradients, in host memory that the other ranks can read."""
        lengths: dict[tuple[Communicator, torch.dtype], list[int]] = {}
        for unit, gradients in self.order:
            if gradients.on_host and not gradients.adopts:
                lengths.setdefault(self._kind(unit.ranks, gradients), []).append(gradients.layout.numel)
        for kind, of_each in lengths.items():
            (peers, dtype), (count, longest) = kind, gradient_buffers(of_each)
            there = self._buffers.get(kind)
            if there is None or len(there) < count or there[0].numel() < longest:
                self._buffers[kind] = deque(host_arrays(peers, dtype, longest, count))

    @staticmethod
    def _kind(ranks: DataParallelRanks, gradients: Gradients) -> tuple[Communicator, torch.dtype]:
        """The ranks that read a gradient buffer, and its dtype."""
        if gradients.sums is not None:
            return ranks.data_parallel, gradients.reduce_dtype
        return ranks.shard if ranks.shard.size > 1 else ranks.replicate, gradients.reduce_dtype

    # From autograd's hook to the shards: `take`, `complete`, then `begin_reduction` and `end_reduction` in unit/gradients.py

    def take(self, number: int, index: int) -> Unit | None:
        """Take the full gradient of parameter `index` of `gradients[number]`. Returns the unit, unless another stage reduces it."""
        unit, gradients = self.gradients[number]
        place = self._turn.places.get(gradients)
        if place is None:
            return None  # of another stage
        if place < self._next and unit.sync_gradients:
            raise RuntimeError(
                f"parameter {gradients.params[index].name} got a second gradient in one backward, after the first was reduced: an "
                "autograd function around a call of its module runs a backward within the backward, as reentrant activation "
                "checkpointing does; pass use_reentrant=False, or shard that module by itself (fully_shard(module))"
            )
        self.is_pending = False
        stays = gradients.adopts or gradients.stays_full
        if place == self._next and unit.sync_gradients and gradients.on_host and not stays:
            gradients.place_grad(index, self._buffer(unit, gradients))
        elif not unit.sync_gradients:
            gradients.waiting.add(index)
        self._missing[unit].discard((gradients, index))
        return unit

    def complete(self, unit: Unit) -> None:
        """Mark a unit as complete: see [Note: complete]. Then reduce the complete units that are next in order."""
        if not unit.reduces_early:
            return
        self._complete.add(unit)
        while (
            not self.is_pending
            and self._next < len(self._turn.order)
            and self._turn.order[self._next][0] in self._complete
        ):
            self._reduce_next()

    def _reduce_next(self) -> None:
        unit, gradients = self._turn.order[self._next]
        self._next += 1
        if not unit.sync_gradients:
            self._left_some = True
            return
        self.done.append(gradients)
        if gradients.stays_full:
            gradients.leave_full()
            return
        if gradients.adopts:
            gradients.adopt_grads()
            return
        self._end_one()
        gradients.begin_reduction(self._buffer(unit, gradients), over_copies=unit.sync_copies)
        if gradients.on_host:
            self._buffers[self._kind(unit.ranks, gradients)].rotate()
        self.reducing = gradients

    def _buffer(self, unit: Unit, gradients: Gradients) -> torch.Tensor:
        if not gradients.on_host:
            return torch.empty(gradients.layout.numel, dtype=gradients.reduce_dtype, device=gradients.device)
        return self._buffers[self._kind(unit.ranks, gradients)][0]

    def _end_one(self) -> None:
        if self.reducing is not None:
            self.reducing.end_reduction()
            self.reducing = None

    # A backward

    def begin(self, expected: Expected | None = None) -> None:
        """Begin a backward. `expected`: the gradients that will come; None: those of all trained parameters."""
        self._next = 0
        self._left_some = False
        self._complete.clear()
        if self.stages not in self._turns:
            order = [each for each in self.order if self.stages is None or each[1].stage in self.stages]
            self._turns[self.stages] = _Turn(self.units, order)
        self._turn = self._turns[self.stages]
        # Each backward of a stage is declared as a round, or as none. So it is one, too, on a rank that has used nothing of the stage.
        self.is_pending = self.stages is None and any(gradients.sums is not None for _, gradients in self._turn.order)
        self._expects_all = expected is None
        self._missing = {
            unit: set(trained) if expected is None else trained & expected.get(unit, set())
            for unit, trained in self._turn.trained.items()
        }
        self.done.clear()
        for _, gradients in self.order:
            gradients.is_compressed = self.compression is not None and self.compression.takes(gradients)

    def expect(self, more: Expected) -> None:
        """Expect the gradients of a backward within the backward, too."""
        for unit, places in more.items():
            self._missing[unit] |= self._turn.trained[unit] & places

    def expect_all(self, unit: Unit) -> None:
        """Expect all gradients of a unit, those that have come once more."""
        self._missing[unit] = set(self._turn.trained[unit])

    def has_all(self, unit: Unit) -> bool:
        """Whether all gradients of a unit that were expected have come."""
        return not self._missing[unit]

    def end(self, *, makes_graph: bool) -> None:
        """End a backward: reduce the other units, and wait. `makes_graph`: the backward recorded a graph for a later backward."""
        if self.is_pending:
            return
        if not makes_graph and self._expects_all:
            self.has_missed |= any(
                0 < len(left) < len(self._turn.trained[unit]) for unit, left in self._missing.items()
            )
        while self._next < len(self._turn.order):
            self._reduce_next()
        self._end_one()
        if self._left_some or self.waits:
            # After a backward under `no_sync` on all ranks: one of them may have computed no gradient, and its reduction is collective.
            self.waits = self._left_some or any(flat.has_full_grads for unit in self.units for flat in unit.flats)

    def compress(self) -> None:
        """Average the gradients that are left to compression, and wait for all copies to the host: see [Note: compressed]."""
        if self.compression is not None and self.done:
            left = [
                (gradients, index, grad)
                for gradients in self.done
                if gradients.is_compressed
                for index, grad in gradients.take_left()
            ]
            means = self.compression.reduce([(gradients.params[index], grad) for gradients, index, grad in left])
            for (gradients, index, _), mean in zip(left, means, strict=True):
                gradients.give(index, mean)
            self.compression.count += 1
        for gradients in self.done:
            gradients.end_offload()

    def check_reduced(self, params: Iterable[torch.Tensor], doing: str) -> None:
        """RuntimeError if gradients of these shards still wait for their reduction, so that `doing` would miss them."""
        incomplete = [(each, each.sums) for _, each in self.order if each.sums is not None and each.is_within_step]
        if not self.waits and not incomplete:
            return
        asked = {id(param) for param in params}
        for gradients, sums in incomplete:
            if any(id(param.shard) in asked for param in gradients.params):
                raise RuntimeError(
                    f"{doing}: only {sums.num_done} of the {sums.num_rounds} rounds of a step had a backward; expected one for each of "
                    "mpitrain.rounds(model) before it, or model.zero_grad() to begin the step again"
                )
        for flat in (flat for unit in self.units for flat in unit.flats):
            if flat.has_full_grads and any(id(param.shard) in asked for param in flat.params):
                raise RuntimeError(
                    f"{doing}: gradients of backwards under no_sync wait to be reduced; run a backward outside of no_sync first, "
                    "or drop them by model.zero_grad()"
                )

    def reset(self) -> None:
        """Drop the full gradients of backwards under `no_sync`, and the sums of a step with slices that has not ended."""
        self.reset_rounds()
        for unit in self.units:
            for flat in unit.flats:
                flat.reset_grads()
        self.waits = False

    def reset_rounds(self) -> None:
        """Begin a step with slices again."""
        for _, gradients in self.order:
            if gradients.sums is not None:
                gradients.sums.reset()

    def abandon(self) -> None:
        """Wait for a reduction that began before an exception, and drop its result."""
        if self.reducing is not None:
            self.reducing.abandon_reduction()
            self.reducing = None

    # Parameters thawed since they were sharded: see [Note: agreement]

    def agree(self, comm: Communicator) -> bool:
        """Find the parameters that the user has thawed, and reduce their gradients from now on. Not within a backward. Collective.

        Returns whether there were any. RuntimeError on all ranks if the thawed parameters differ between the ranks.
        """
        thawed = [n for n, (flat, index) in enumerate(self.frozen) if flat.params[index].shard.requires_grad]
        anywhere = torch.tensor([bool(thawed)])
        comm.all_reduce(anywhere, "max")
        if not anywhere:
            return False
        of_ranks = [set(numbers) for numbers in comm.all_gather_object(thawed)]
        if differing := set.union(*of_ranks) - set.intersection(*of_ranks):
            flags = [min(differing) in numbers for numbers in of_ranks]
            flat, index = self.frozen[min(differing)]
            raise RuntimeError(
                f"parameter {flat.params[index].name} was frozen when it was sharded; now its requires_grad is True on rank "
                f"{flags.index(True)} and False on rank {flags.index(False)}, and the ranks could not reduce its gradient; set it on "
                "all ranks alike"
            )
        of_flats: dict[FlatParameters, list[int]] = {}
        for flat, index in (self.frozen[number] for number in thawed):
            of_flats.setdefault(flat, []).append(index)
        for flat, indices in of_flats.items():
            flat.thaw(indices)
        self._take_order()
        return True
