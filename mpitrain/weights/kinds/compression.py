"""The state of `compress_gradients` in a checkpoint.

`compression/residual/NAME` has the residuals of all contributors: (contributors, *shape of the parameter), fp32. On as many
contributors each gets its own again. On another number each gets the mean of all, so the mean gradient loses nothing.
`compression/basis/NAME` has the bases of PowerSGD, (rank, columns); those of ranks that tensor parallelism gives other parts of the
matrix lie end to end. A basis of another shape is not loaded, and the method begins with its first one.
"""

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

import ckpt
from collectives import Communicator
from mpitrain.placement.marks import pieces_of
from mpitrain.placement.parts import part_of
from mpitrain.sharding.compression.compression import Compression, ParamState
from mpitrain.weights.kinds.kind import There

Read = Callable[..., None]
"""Fills tensors from the checkpoint of a load: `read(tensors, only=...)`. Collective."""


class SavedCompression:
    """What of a model's compression is saved and loaded. Making it is collective.

    `stages`: the ranks of the pipeline, or None. `read`: for a load. `names`: of the parameters whose state is loaded; None: all.
    """

    def __init__(
        self,
        compression: Compression,
        stages: Communicator | None,
        read: Read | None,
        names: Container[str] | None = None,
    ) -> None:
        self._its, self._stages, self._read = compression, stages, read
        self._states = [state for state in compression.states.values() if names is None or state.name in names]
        self._columns = _columns_of_bases(compression)
        has_residuals = torch.tensor([compression.has_residuals])
        compression.copy.all_reduce(has_residuals, "max")  # of all stages of a pipeline
        self._has_residuals = bool(has_residuals)

    def meta(self) -> dict[str, Any]:
        its = self._its
        numbers = {"reductions": its.count, "scale": its._residual_scale, "has_residuals": self._has_residuals}
        return {"compression": numbers}

    def tensors(self) -> dict[str, Any]:
        """Each rank has those that it owns."""
        found: dict[str, Any] = {}
        for state in self._states:
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

    def room(self, there: There) -> dict[str, Any]:
        """Of the tensors in a checkpoint those that can be loaded as they are, to be filled in place."""
        found: dict[str, Any] = {}
        for state in self._states:
            name = _residual(state)
            if name in there.tensors and self._its.method.error_feedback and self._as_many(name, there):
                if state.residual is None and self._its.owns(state):
                    state.residual = self._its.new_residual(state)  # it is sent by the next reduction
                found[name] = self._boxes(state, self._its.num_contributors)
            if self._fits(state, there):
                found[_basis(state)] = self._box_of_basis(state)
        return found

    def _to_average(self, there: There) -> Iterator[tuple[str, list[ckpt.Shard]]]:
        """The residuals of another number of contributors: name and room, one after the other. After a load the next has the mean."""
        if not self._its.method.error_feedback:
            return
        for state in self._states:
            name = _residual(state)
            if name not in there.tensors or self._as_many(name, there):
                continue
            shape, owned = there.tensors[name].shape, self._its.owns(state)
            places = pieces_of(state.param.full) if owned else []
            rooms = [torch.empty(shape[0], *box.shape) for _, box in places]
            pairs = zip(rooms, places, strict=True)
            yield name, [ckpt.Shard(room, shape, (0, *box.offset)) for room, (_, box) in pairs]
            if owned and state.residual is None:
                state.residual = self._its.new_residual(state)
            for room, (place, _) in zip(rooms, places, strict=True):
                assert state.residual is not None
                state.residual[place].copy_(room.mean(0, dtype=torch.float64))

    def loaded(self, there: There) -> None:
        """Without compression in the checkpoint it begins anew."""
        assert self._read is not None
        rooms = self._to_average(there)
        for name, room in rooms if self._stages is None else _of_all_stages(rooms, self._stages):
            self._read({name: room}, only=[name])
        its, meta = self._its, there.part("compression")
        if meta is None:
            its.reset()
            return
        its.count, its._residual_scale = meta["reductions"], meta["scale"]
        its.has_residuals = meta["has_residuals"] and its.method.error_feedback
        for state in self._states:
            if _residual(state) not in there.tensors:
                its.reset_residual(state)
            elif its.method.error_feedback:
                state.has_residual = meta["has_residuals"]
            if state.basis is not None and not self._fits(state, there):
                its.reset_basis(state)

    def _fits(self, state: ParamState, there: There) -> bool:
        """Whether the checkpoint has a basis for this layout."""
        stored = there.tensors.get(_basis(state))
        if state.basis is None or stored is None:
            return False
        return stored.shape == (len(state.basis), self._columns[state][1])

    def _as_many(self, residual: str, there: There) -> bool:
        """Whether the checkpoint has this residual of as many contributors."""
        return there.tensors[residual].shape[0] == self._its.num_contributors

    def _boxes(self, state: ParamState, count: int) -> list[ckpt.Shard]:
        if state.residual is None:
            return []
        part = part_of(state.param.full)
        shape = (count, *(state.param.full.shape if part is None else part.full_shape))
        return [
            ckpt.Shard(state.residual[place][None], shape, (self._its.contributor, *box.offset))
            for place, box in pieces_of(state.param.full)
        ]

    def _box_of_basis(self, state: ParamState) -> ckpt.Shard:
        assert state.basis is not None
        first, columns = self._columns[state]
        return ckpt.Shard(state.basis, (len(state.basis), columns), (0, first))


def _residual(state: ParamState) -> str:
    return f"compression/residual/{state.name}"


def _basis(state: ParamState) -> str:
    return f"compression/basis/{state.name}"


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


def _of_all_stages(rooms: Iterator[tuple[str, Any]], stages: Communicator) -> Iterator[tuple[str, Any]]:
    """The rooms of all stages, in the same order on all ranks: those of other stages are empty. Collective."""
    for of_stage in range(stages.size):
        mine = rooms if stages.rank == of_stage else iter(())
        while (name := stages.broadcast_object((room := next(mine, ("", ())))[0], of_stage)) != "":
            yield name, room[1]
