"""Computes with whole matrices that are spread over ranks: each on one rank, its owner, to which the others send their boxes.

One all-to-all brings the boxes to the owners, and one brings the results back, so each matrix is computed with once.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch

from collectives import Communicator
from mpitrain.optim.owners import Boxes, Matrix, assign, routes
from mpitrain.placement.parts import Box, ParameterPiece

Place = tuple[slice, ...]


class WholeMatrices:
    """`matrices` that the ranks of `comm` hold in boxes; `mine[i]`: this rank's pieces of matrix i. All ranks make the same object."""

    def __init__(
        self, comm: Communicator, matrices: Sequence[Matrix], mine: Sequence[Sequence[ParameterPiece]]
    ) -> None:
        self._comm, self._matrices, self._mine = comm, matrices, mine
        self._places = [{piece.box: piece.place for piece in pieces} for pieces in mine]
        self.owners = assign(matrices, comm.size)
        self._routes = routes(matrices, self.owners, comm.rank, comm.size)
        self._all_have_all = all(matrix.is_everywhere for matrix in matrices)

    @torch.no_grad()
    def map(
        self, parts: Sequence[torch.Tensor], compute: Callable[[int, torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> list[list[tuple[Place, torch.Tensor]]]:
        """What `compute(index, matrix)` makes of every whole matrix, for the elements of `parts`: this rank's parts of the matrices.

        Returns for each part the results at its places. `compute` gets a contiguous matrix of `dtype` in memory of its own, and returns
        one of the same shape and dtype. Elements travel in `dtype`. Collective.
        """
        paths, device = self._routes, parts[0].device

        def box_of(index: int, box: Box) -> torch.Tensor:
            return parts[index][self._places[index][box]]

        wholes = {
            index: torch.empty(self._matrices[index].shape, dtype=dtype, device=device)
            for index, owner in enumerate(self.owners)
            if owner == self._comm.rank
        }
        sent = [[box_of(*which) for which in boxes] for boxes in paths.sends]
        for index, box, values in self._exchange(sent, paths.receives, dtype, device):
            wholes[index][_within(box)] = values
        for index, box in paths.own:
            wholes[index][_within(box)] = box_of(index, box)
        results = {index: compute(index, whole) for index, whole in wholes.items()}

        if self._all_have_all:
            results = self._shared(results, dtype, device)
        returned = [[results[index][_within(box)] for index, box in boxes] for boxes in paths.returns]
        found = {(i, box): values for i, box, values in self._exchange(returned, paths.gets_back, dtype, device)}
        return [
            [(place, results[index][_within(box)] if index in results else found[index, box]) for place, box in pieces]
            for index, pieces in enumerate(self._mine)
        ]

    def _exchange(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        expected: Sequence[Boxes],
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[tuple[int, Box, torch.Tensor]]:
        """Send `sent[p]` to rank p; returns what `expected[p]` names, from rank p."""
        if self._all_have_all:
            return []
        send_counts = [sum(part.numel() for part in parts) for parts in sent]
        recv_counts = [sum(box.numel for _, box in boxes) for boxes in expected]
        out = torch.empty(sum(recv_counts), dtype=dtype, device=device)
        flat = _packed([part for parts in sent for part in parts], dtype, device)
        self._comm.all_to_all(out, flat, send_counts=send_counts, recv_counts=recv_counts)
        named = [which for boxes in expected for which in boxes]
        values = out.split([box.numel for _, box in named])
        return [(index, box, part.view(box.shape)) for (index, box), part in zip(named, values, strict=True)]

    def _shared(
        self, results: dict[int, torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> dict[int, torch.Tensor]:
        """All results on all ranks. An all-gather sends each result to a node once, and an all-to-all to each of its ranks."""
        if self._comm.size == 1:
            return results
        order = sorted(range(len(self.owners)), key=lambda index: (self.owners[index], index))
        lengths = [prod(self._matrices[index].shape) for index in order]
        counts = [0] * self._comm.size
        for index, length in zip(order, lengths, strict=True):
            counts[self.owners[index]] += length
        out = torch.empty(sum(counts), dtype=dtype, device=device)
        self._comm.all_gather(out, _packed(list(results.values()), dtype, device), counts=counts)
        values = zip(order, out.split(lengths), strict=True)
        return {index: flat.view(self._matrices[index].shape) for index, flat in values}


def _packed(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All elements in one array."""
    flat = [part.to(dtype).reshape(-1) for part in parts]
    return torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)


def _within(box: Box) -> Place:
    """The indices of a box in the whole matrix."""
    return tuple(slice(begin, begin + length) for begin, length in zip(*box, strict=True))
