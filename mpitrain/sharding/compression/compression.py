"""The compressed reduction of one model's gradients over its copies.

[Note: contributors] Within a node bytes cost little. So on several nodes the ranks of a node first add up their gradients exactly, in
node memory, and each node is one contributor. Its matrices are divided over its ranks by size: a matrix has an owner on each node,
which has the residual, and exchanges messages with the owners on the other nodes. On one node each rank is a contributor, so a program
can be tried on one computer.

[Note: whole steps] A gradient that is not finite makes a message not finite, and all ranks have the same messages, so it reaches all.
Then a training loop skips the step. So all matrices of a model are reduced together, at the end of a backward, and residuals change
only if all messages were finite. Ranks with other parts of the model (shards, tensor parallelism) have other messages, so these ranks
agree. The stages of a pipeline do not: a stage whose parameters are frozen reduces nothing. Until the end the gradients stay where
autograd put them, and the means replace them there.

[Note: clipping] An outlier in a residual would stay there for many steps, and would take others with it when the sum is clipped. So a
contributor clips its own gradient before it adds the residual (local gradient clipping: Lin et al., "Deep gradient compression", ICLR
2018, section 3.2). If the gradients of N contributors are independent, their mean is shorter by the root of N. So they are clipped to
root(N) times the norm of the mean's clipping.

[Note: flush] A contributor's residual is added to its gradient before the message, and what the message lacks becomes the residual.
If a reduction is exact although residuals exist (one contributor after a load, or more `exact_steps`), it sends them whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod, sqrt
from typing import Any

import torch

from mpitrain.optim.norms import norms_of_each
from mpitrain.optim.owners import Matrix, assign
from mpitrain.placement.axes import group_of
from mpitrain.placement.marks import counts_in_norms
from mpitrain.placement.parts import part_of
from mpitrain.sharding.compression.method import Method
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.sharding.unit.gradients import Gradients
from mpitrain.sharding.unit.host_arrays import host_arrays
from mpitrain.sharding.unit.parameter import ShardedParameter

# Messages have fp32. Other dtypes are reduced as without compression.
_REDUCED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class ParamState:
    """What a rank knows of a parameter's compression. `owner`: the rank of its node that reduces it with other nodes."""

    param: ShardedParameter
    name: str
    shape: tuple[int, int] | None  # as a matrix; None: the parameter is reduced exactly
    owner: int
    basis: torch.Tensor | None = None
    residual: torch.Tensor | None = None  # fp32, with the shape of the full parameter; None on ranks that do not own it
    has_residual: bool = False  # whether a contributor's residual may not be zero; the same on all ranks of `replicate`


@dataclass(eq=False)
class _Gradient:
    """A gradient on its way through a reduction."""

    state: ParamState
    value: torch.Tensor  # this rank's rows, fp32; in the end those of the mean
    is_coded: bool  # or averaged exactly
    given: torch.Tensor | None = None  # on the owner: what its contributor has, with the residual
    kept: Any = None  # on the owner: what `Method.residual` needs
    result: torch.Tensor | None = None  # int32: the code, or the bits of the exact mean; at first on the owner alone

    @property
    def matrix_shape(self) -> tuple[int, int]:
        assert self.state.shape is not None
        return self.state.shape

    @property
    def matrix(self) -> torch.Tensor:
        """`given` as a matrix."""
        assert self.given is not None
        return self.given.view(self.matrix_shape)


class Compression:
    """The state of a model's compression on this rank, whose copies are on `ranks.replicate`. Making it is collective."""

    def __init__(
        self, method: Method, ranks: DataParallelRanks, params: Mapping[str, ShardedParameter], exact: set[str]
    ) -> None:
        """`params`: by name, the same order on all ranks. `exact`: the names of those that are not compressed."""
        replicate = ranks.replicate
        self.method, self.num_ranks = method, replicate.size
        self.by_node = 1 < replicate.num_nodes < replicate.size
        self.local = replicate.node if self.by_node else group_of(replicate, 1)
        self.across = replicate
        if self.by_node:
            across = replicate.split(self.local.rank)
            assert across is not None
            self.across = across  # the owners of one matrix; ranks that own none are in groups of no use
        self.num_contributors = replicate.num_nodes if self.by_node else replicate.size
        self.contributor = self.across.rank
        self.copy = ranks.copy
        """The ranks that hold one copy of the model."""
        parts = [part for param in params.values() if (part := part_of(param.full)) is not None]
        self._beside = [comm for comm in dict.fromkeys((ranks.shard, *(part.over for part in parts))) if comm.size > 1]
        """The ranks that reduce other parts of the model in the same backward."""
        self.count = 0
        """Reductions so far."""
        self.has_residuals = False
        """Whether a residual of the model may not be zero. The same on all ranks of a stage."""
        self.scale = 1.0
        """The factor of the loss, and so of the next gradients: see `GradScaler`."""
        self._residual_scale = 1.0
        self._room: torch.Tensor | None = None
        # The ranks of a node share the matrices out by size.
        num_owners = min(map(len, replicate.nodes)) if self.by_node else 1
        sizes = [param.box.numel for param in params.values()]
        owners = assign([Matrix((size,), size, ((),) * num_owners) for size in sizes], num_owners)
        self.states = {
            param: ParamState(param, name, None if name in exact else matrix_shape(param), owner)
            for (name, param), owner in zip(params.items(), owners, strict=True)
        }
        self.reset()

    def reset(self) -> None:
        """Begin anew: no reduction so far, no residual, the first bases."""
        self.count, self._residual_scale, self.has_residuals = 0, self.scale, False
        for state in self.states.values():
            self.reset_basis(state)
            self.reset_residual(state)

    def reset_basis(self, state: ParamState) -> None:
        """Begin anew with the first basis of a parameter."""
        if state.shape is not None:
            basis = self.method.basis(state.shape[1], state.name)
            state.basis = None if basis is None else basis.to(state.param.full.device)

    def reset_residual(self, state: ParamState) -> None:
        """Begin anew without a residual of a parameter."""
        is_kept = state.shape is not None and self.method.error_feedback and self.owns(state)
        state.residual, state.has_residual = self.new_residual(state) if is_kept else None, False

    def new_residual(self, state: ParamState) -> torch.Tensor:
        """A residual of zeros."""
        full = state.param.full
        return torch.zeros(full.shape, dtype=torch.float32, device=full.device)

    def owns(self, state: ParamState) -> bool:
        """Whether this rank has the residual of a parameter."""
        return state.owner == self.local.rank and state.param.box.numel > 0

    @property
    def is_exact(self) -> bool:
        """Whether the next reduction is exact."""
        return self.count < self.method.exact_steps or self.num_contributors == 1

    def takes(self, gradients: Gradients) -> bool:
        """Whether the next reduction of these gradients is `reduce`. The same on all ranks of a stage."""
        return gradients.reduce_dtype in _REDUCED and (not self.is_exact or self.has_residuals)

    @torch.no_grad()
    def reduce(self, grads: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> list[torch.Tensor]:
        """The means of gradients over the contributors, in the same order. Collective: all ranks pass the same parameters.

        A gradient has the shape of this rank's rows. Its memory may become that of the mean.
        """
        self._rescale()
        if not grads:
            return []
        is_exact, states = self.is_exact, [self.states[param] for param, _ in grads]
        gradients = [
            _Gradient(
                state,
                grad.to(torch.float32).contiguous(),
                state.shape is not None and not is_exact and grad.numel() > 0,
            )
            for state, (_, grad) in zip(states, grads, strict=True)
        ]
        own = self._give(gradients)
        self._second_round(own, self._first_round(own))
        self._commit(gradients, is_finite=self._share(gradients))
        for gradient in gradients:
            assert gradient.result is not None
            if gradient.is_coded:
                self.method.decode(gradient.result, gradient.value.view(gradient.matrix_shape))
            else:
                gradient.value.view(-1).copy_(gradient.result.view(torch.float32))
        return [gradient.value for gradient in gradients]

    def _rescale(self) -> None:
        if self.scale != self._residual_scale:
            for state in self.states.values():
                if state.residual is not None:
                    state.residual *= self.scale / self._residual_scale
            self._residual_scale = self.scale

    def _give(self, gradients: Sequence[_Gradient]) -> list[_Gradient]:
        """Find what this rank's contributor gives of the gradients that the rank owns, and return these.

        The mean of what the contributors give, without residuals, is the mean over the ranks.
        """
        own = [gradient for gradient in gradients if gradient.state.owner == self.local.rank]
        given = [gradient.value for gradient in own]
        if self.by_node:
            order = self._by_owner(gradients)
            counts = self._counts(order, [gradient.value.numel() for gradient in order])
            room = self._node_memory(sum(counts), gradients[0].value.device)
            torch.cat([gradient.value.view(-1) for gradient in order], out=room)
            out = torch.empty(counts[self.local.rank], device=room.device)
            self.local.reduce_scatter(out, room, "sum", counts=counts)
            out *= self.num_contributors / self.num_ranks
            parts = out.split([gradient.value.numel() for gradient in own])
            given = [part.view(gradient.value.shape) for gradient, part in zip(own, parts, strict=True)]
        if self.method.clip_norm is not None and not self.is_exact:
            self._clip(given, [gradient.state for gradient in own], self.method.clip_norm)
        for gradient, its in zip(own, given, strict=True):
            if gradient.state.residual is not None:
                its += gradient.state.residual
            gradient.given = its
        return own

    def _clip(self, given: Sequence[torch.Tensor], states: Sequence[ParamState], clip_norm: float) -> None:
        """Clip what this rank's contributor gives: see [Note: clipping]. Collective over the contributor."""
        counted = [its for its, state in zip(given, states, strict=True) if counts_in_norms(state.param.full)]
        squares = torch.tensor([norm * norm for norm in norms_of_each(counted)], dtype=torch.float64).sum()
        for comm in (self.local, *self._beside):
            if comm.size > 1:
                comm.all_reduce(squares)
        limit = clip_norm * self.scale * sqrt(self.num_contributors)
        norm = squares.sqrt().item()
        if limit < norm < inf:
            for its in given:
                its *= limit / norm

    @staticmethod
    def _by_owner(gradients: Sequence[_Gradient]) -> list[_Gradient]:
        return sorted(gradients, key=lambda gradient: gradient.state.owner)

    def _counts(self, gradients: Sequence[_Gradient], numels: Sequence[int]) -> list[int]:
        """The elements of each rank of the node."""
        counts = [0] * self.local.size
        for gradient, numel in zip(gradients, numels, strict=True):
            counts[gradient.state.owner] += numel
        return counts

    def _node_memory(self, numel: int, device: torch.device) -> torch.Tensor:
        """Memory for the gradients of a node's ranks, which the other ranks read."""
        if device.type != "cpu":
            return torch.empty(numel, device=device)
        if self._room is None or self._room.numel() < numel:
            self._room = host_arrays(self.local, torch.float32, numel, 1)[0]
        return self._room[:numel]

    def _first_round(self, own: Sequence[_Gradient]) -> list[torch.Tensor]:
        """Average the exact gradients, and what the method averages first of the others, which is returned."""
        exact = [gradient for gradient in own if not gradient.is_coded]
        coded = [gradient for gradient in own if gradient.is_coded]
        firsts = self.method.begin([each.matrix for each in coded], [each.state.basis for each in coded])
        parts = [gradient.given for gradient in exact if gradient.given is not None] + firsts
        if not parts:
            return []
        message = torch.cat([part.reshape(-1) for part in parts])
        if message.numel():
            self.across.all_reduce(message, "avg")
        means = message.split([part.numel() for part in parts])
        for gradient, mean in zip(exact, means[: len(exact)], strict=True):
            gradient.result = mean.view(torch.int32)
        return [mean.view(first.shape) for mean, first in zip(means[len(exact) :], firsts, strict=True)]

    def _second_round(self, own: Sequence[_Gradient], means: Sequence[torch.Tensor]) -> None:
        """Find the codes of the other gradients, from the means of the first round."""
        coded = [gradient for gradient in own if gradient.is_coded]
        codes, kept = self.method.code([gradient.matrix for gradient in coded], means, self.across)
        for gradient, code, its in zip(coded, codes, kept, strict=True):
            gradient.result, gradient.kept = code, its

    def _share(self, gradients: Sequence[_Gradient]) -> bool:
        """Give all ranks of the node the results of all owners. Returns whether the results are finite."""
        device = gradients[0].value.device
        order = self._by_owner(gradients)
        sent = [gradient.result.reshape(-1) for gradient in order if gradient.result is not None]
        results = torch.cat([torch.empty(0, dtype=torch.int32, device=device), *sent])
        lengths = [
            self.method.numel(*each.matrix_shape, self.num_contributors) if each.is_coded else each.value.numel()
            for each in order
        ]
        if self.by_node:
            everything = torch.empty(sum(lengths), dtype=torch.int32, device=device)
            self.local.all_gather(everything, results, counts=self._counts(order, lengths))
            results = everything
        for gradient, result in zip(order, results.split(lengths), strict=True):
            gradient.result = result
        # The places of `top_k`, read as fp32, are finite.
        return bool(results.view(torch.float32).isfinite().all())

    def _commit(self, gradients: Sequence[_Gradient], *, is_finite: bool) -> None:
        """Update residuals and bases, if all results are finite: see [Note: whole steps]. Collective over the parts of the model."""
        after = {each.state: each.is_coded and self.method.error_feedback for each in gradients}
        has_residuals = any(after.get(state, state.has_residual) for state in self.states.values())
        flags = torch.tensor([not is_finite, has_residuals])
        for comm in self._beside:
            comm.all_reduce(flags, "max")
        if flags[0]:
            return
        self.has_residuals = bool(flags[1])
        for gradient in gradients:
            state = gradient.state
            if gradient.is_coded and state.basis is not None:
                assert gradient.result is not None
                self.method.next_basis(gradient.result, state.basis)
            state.has_residual = after[state]
            if state.residual is None:
                continue
            if gradient.is_coded:
                self.method.residual(gradient.matrix, gradient.kept, state.residual.view(gradient.matrix_shape))
            else:
                state.residual.zero_()  # it was sent


def matrix_shape(param: ShardedParameter) -> tuple[int, int] | None:
    """The shape of a parameter as a matrix, for a convolution (out, rest); None for vectors and complex numbers."""
    full = param.full
    if full.ndim < 2 or not full.is_floating_point() or not full.numel():
        return None
    return full.shape[0], prod(full.shape[1:])
