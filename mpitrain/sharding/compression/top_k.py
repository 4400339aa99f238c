"""Top-k: the largest elements of each matrix, with their places (Aji and Heafield, EMNLP 2017; Lin et al., ICLR 2018).

The code of a matrix: for each contributor k places and k values, int32: the values' bits. All ranks add the values in the order of the
contributors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from collectives import Communicator
from mpitrain.sharding.compression.method import check_arguments


@dataclass(frozen=True)
class TopK:
    """The method: see `top_k`."""

    share: float
    exact_steps: int
    error_feedback: bool
    clip_norm: float | None

    def takes(self, rows: int, columns: int) -> bool:
        return 2 * self._count(rows * columns) < rows * columns < 2**30  # a place has 32 bits

    def numel(self, rows: int, columns: int, contributors: int) -> int:
        return 2 * self._count(rows * columns) * contributors

    def _count(self, numel: int) -> int:
        return max(round(self.share * numel), 1)

    def basis(self, columns: int, name: str) -> None:
        return None

    def begin(self, matrices: Sequence[torch.Tensor], bases: Sequence[Any]) -> list[torch.Tensor]:
        return []

    def code(
        self, matrices: Sequence[torch.Tensor], means: Sequence[torch.Tensor], across: Communicator
    ) -> tuple[list[torch.Tensor], list[Any]]:
        flats = [matrix.view(-1) for matrix in matrices]
        places = [flat.abs().topk(self._count(flat.numel()), sorted=False).indices for flat in flats]
        lengths = [2 * len(of_one) for of_one in places]
        mine = [
            part
            for flat, of_one in zip(flats, places, strict=True)
            for part in (of_one.int(), flat[of_one].view(torch.int32))
        ]
        if not matrices:
            return [], []
        # int32, also the bits of the values: no wire format below fp32 may change the places.
        everyone = torch.empty(across.size, sum(lengths), dtype=torch.int32, device=flats[0].device)
        across.all_gather(everyone.view(-1), torch.cat(mine))
        return [part.reshape(-1) for part in everyone.split(lengths, 1)], places

    def residual(self, matrix: torch.Tensor, own: Any, out: torch.Tensor) -> None:
        out.copy_(matrix).view(-1)[own] = 0

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        total, count = out.view(-1).zero_(), self._count(out.numel())
        pairs = code.view(-1, 2, count)
        for places, values in pairs:  # the places of one contributor differ, so the order of additions is fixed
            total.index_add_(0, places, values.view(torch.float32))
        total /= len(pairs)

    def next_basis(self, code: torch.Tensor, basis: None) -> None:
        """Nothing: the method has no basis."""


def top_k(
    share: float = 0.01, *, exact_steps: int = 0, error_feedback: bool = True, clip_norm: float | None = None
) -> TopK:
    """The largest elements of each matrix for `compress_gradients`: `share` of them, by magnitude, with their places.

    A matrix is compressed if `share` is below one half, because a place takes as many bytes as a value. `exact_steps`: the number of
    first reductions, which are exact. `error_feedback`: each contributor keeps the elements that it did not send, fp32, and adds them
    to its next gradient. `clip_norm`: the norm to which `clip_grad_norm_` clips the mean gradient after the backward. Contributors then
    clip their own gradients first, before they add what they kept, to clip_norm times the root of their number (Lin et al. 2018).
    TypeError for arguments of other types, ValueError for a share that is not above 0 and below 0.5, negative exact_steps, or a
    clip_norm that is not above 0.
    """
    if type(share) not in (int, float):
        raise TypeError(f"top_k: share is {share!r}; expected a number")
    if not 0 < share < 0.5:
        raise ValueError(f"top_k: share is {share}; expected a number above 0 and below 0.5")
    check_arguments("top_k", exact_steps=exact_steps, error_feedback=error_feedback)
    if clip_norm is not None and (type(clip_norm) not in (int, float) or not 0 < clip_norm < math.inf):
        raise ValueError(f"top_k: clip_norm is {clip_norm!r}; expected a number above 0, or None")
    return TopK(share, exact_steps, error_feedback, clip_norm)
