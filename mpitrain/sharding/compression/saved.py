"""The state of compression in a checkpoint.

`compression/residual/NAME` has the residuals of all contributors: (contributors, *shape of the parameter), fp32. On as many
contributors each gets its own again. On another number each gets the mean of all, so the mean gradient loses nothing.
`compression/basis/NAME` has the bases of PowerSGD, (rank, columns); those of ranks that tensor parallelism gives other parts of the
matrix lie end to end. A basis of another shape is not loaded, and the method begins with its first one.

The tensors are made with `ckpt.Shard`, as in `mpitrain.weights.state`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import ckpt
from mpitrain.parts import Box, Piece, part_of
from mpitrain.sharding.compression.compression import Compression, ParamState

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a checkpoint's tensors by name."""


class SavedCompression:
    """What of a model's compression is saved and loaded. Making it is collective."""

    def __init__(self, compression: Compression) -> None:
        self._its = compression
        self._columns = _columns_of_bases(compression)
        has_residuals = torch.tensor([compression.has_residuals])
        compression.copy.all_reduce(has_residuals, "max")  # of all stages of a pipeline
        self._has_residuals = bool(has_residuals)

    def meta(self) -> dict[str, Any]:
        """Plain numbers, the same on all ranks."""
        its = self._its
        return {"reductions": its.count, "scale": its._residual_scale, "has_residuals": self._has_residuals}

    def tensors(self) -> dict[str, Any]:
        """The tensors for a save; each rank has those that it owns."""
        found: dict[str, Any] = {}
        for state in self._its.states.values():
            if state.shape is None and not state.has_residual:
                continue
            part = part_of(state.param.full)
            if self._its.method.error_feedback:
                is_first = part is None or part.copies is None or part.copies.rank == 0
                found[_residual(state)] = self._boxes(state, self._its.num_contributors) if is_first else []
            if state.basis is not None:
                is_first = part is None or part.is_cut or part.over.rank == 0
                is_saved = is_first and self._its.owns(state) and self._its.contributor == 0
                found[_basis(state)] = self._box_of_basis(state) if is_saved else []
        return found

    def room(self, there: Shapes) -> dict[str, Any]:
        """Of the tensors in a checkpoint those that can be loaded as they are, to be filled in place."""
        found: dict[str, Any] = {}
        for state in self._its.states.values():
            name = _residual(state)
            if name in there and self._its.method.error_feedback and self._as_many(there[name]):
                if state.residual is None and self._its.owns(state):
                    state.residual = self._its.new_residual(state)  # it is sent by the next reduction
                found[name] = self._boxes(state, self._its.num_contributors)
            if self._fits(state, there):
                found[_basis(state)] = self._box_of_basis(state)
        return found

    def to_average(self, there: Shapes) -> Iterator[tuple[str, list[ckpt.Shard]]]:
        """The residuals of another number of contributors: name and room, one after the other. After a load the next has the mean."""
        if not self._its.method.error_feedback:
            return
        for state in self._its.states.values():
            name = _residual(state)
            if name not in there or self._as_many(there[name]):
                continue
            count, owned = there[name][0], self._its.owns(state)
            places = _pieces(state) if owned else []
            rooms = [torch.empty(count, *box.shape) for _, box in places]
            yield (
                name,
                [ckpt.Shard(room, there[name], (0, *box.offset)) for room, (_, box) in zip(rooms, places, strict=True)],
            )
            if owned and state.residual is None:
                state.residual = self._its.new_residual(state)
            for room, (place, _) in zip(rooms, places, strict=True):
                assert state.residual is not None
                state.residual[place].copy_(room.mean(0, dtype=torch.float64))

    def loaded(self, meta: Mapping[str, Any] | None, there: Shapes) -> None:
        """Take over the numbers after a load. `meta`: None if the checkpoint has no compression, which then begins anew."""
        its = self._its
        if meta is None:
            its.reset()
            return
        its.count, its._residual_scale = meta["reductions"], meta["scale"]
        its.has_residuals = meta["has_residuals"] and its.method.error_feedback
        for state in its.states.values():
            if _residual(state) not in there:
                its.reset_residual(state)
            elif its.method.error_feedback:
                state.has_residual = meta["has_residuals"]
            if state.basis is not None and not self._fits(state, there):
                its.reset_basis(state)

    def _fits(self, state: ParamState, there: Shapes) -> bool:
        """Whether the checkpoint has a basis for this layout."""
        shape = None if state.basis is None else (len(state.basis), self._columns[state][1])
        return shape is not None and there.get(_basis(state)) == shape

    def _as_many(self, shape: tuple[int, ...]) -> bool:
        return shape[0] == self._its.num_contributors

    def _boxes(self, state: ParamState, count: int) -> list[ckpt.Shard]:
        if state.residual is None:
            return []
        part = part_of(state.param.full)
        shape = (count, *(state.param.full.shape if part is None else part.full_shape))
        return [
            ckpt.Shard(state.residual[place][None], shape, (self._its.contributor, *box.offset))
            for place, box in _pieces(state)
        ]

    def _box_of_basis(self, state: ParamState) -> ckpt.Shard:
        assert state.basis is not None
        first, columns = self._columns[state]
        return ckpt.Shard(state.basis, (len(state.basis), columns), (0, first))


def _residual(state: ParamState) -> str:
    return f"compression/residual/{state.name}"


def _basis(state: ParamState) -> str:
    return f"compression/basis/{state.name}"


def _pieces(state: ParamState) -> list[Piece]:
    """The boxes of the whole parameter in this rank's, and their places in it."""
    shape, part = tuple(state.param.full.shape), part_of(state.param.full)
    if part is not None:
        return part.within((0,) * len(shape), shape)
    return [Piece((slice(None),) * len(shape), Box((0,) * len(shape), shape))]


def _columns_of_bases(compression: Compression) -> dict[ParamState, tuple[int, int]]:
    """Of each basis the first of this rank's columns in the checkpoint, and the number of all columns."""
    based = [state for state in compression.states.values() if state.basis is not None]
    lengths = {state: state.basis.shape[1] for state in based if state.basis is not None}
    found = {state: (0, length) for state, length in lengths.items()}
    cut = [state for state in based if (part := part_of(state.param.full)) is not None and part.is_cut]
    parts = [part for state in cut if (part := part_of(state.param.full)) is not None]
    if parts:
        over = parts[0].over
        for state, of_ranks in zip(
            cut, zip(*over.all_gather_object([lengths[state] for state in cut]), strict=True), strict=True
        ):
            found[state] = sum(of_ranks[: over.rank]), sum(of_ranks)
    return found
