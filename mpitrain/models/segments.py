"""The documents of packed rows, and causal attention within each of them.

Each document has its own call of torch's fused attention. So time is spent on the pairs of tokens within documents alone, and no memory
on masks. With a mask torch's kernel for CPUs also computes the pairs that are masked: on one core, attention over rows of 1024 tokens
took 1.35 times as long as causal attention with a mask, and 0.64 (0.27) times with 3 (12) documents in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812


@dataclass(frozen=True, eq=False)
class Segments:
    """Where documents begin and end in B rows of L tokens. The rest of a row that is padding counts as a document."""

    lengths: tuple[int, ...]
    """Of all documents, row after row, in tokens. Numbers of the host, so that a GPU does not wait for them."""
    positions: torch.Tensor
    """(B, L) int64: of each token in its document, from 0."""

    @classmethod
    def of(cls, numbers_BL: npt.ArrayLike) -> Segments:  # noqa: N803
        """From a number for each token, (B, L), in host memory: neighbours of a row with the same number are one document."""
        numbers = np.asarray(numbers_BL)
        begins = np.ones(numbers.shape, bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        firsts = np.flatnonzero(begins)
        lengths = np.diff(firsts, append=numbers.size)
        positions = np.arange(numbers.size) - np.repeat(firsts, lengths)
        return cls(tuple(lengths.tolist()), torch.tensor(positions.reshape(numbers.shape)))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Segments:
        """The same with other tensors, such as copies on a device."""
        return Segments(self.lengths, change(self.positions))


def attend(
    q_BHLD: torch.Tensor,  # noqa: N803
    k_BHLD: torch.Tensor,  # noqa: N803
    v_BHLD: torch.Tensor,  # noqa: N803
    segments: Segments | None,
) -> torch.Tensor:
    """(B, H, L, D) each -> (B, L, H x D): each token attends to itself and to the tokens before it in its document.

    Without segments a row is one document. Keys and values may have fewer heads than queries, a divisor of their number.
    """
    rows, heads, length, _ = q_BHLD.shape
    is_grouped = heads > k_BHLD.shape[1]

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped).transpose(1, 2)

    if segments is None or len(segments.lengths) == rows:
        return causal(q_BHLD, k_BHLD, v_BHLD).reshape(rows, length, -1)
    # All rows as one, (1, H, B x L, D), which is divided into documents.
    q, k, v = (
        x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None].split(segments.lengths, dim=2)
        for x in (q_BHLD, k_BHLD, v_BHLD)
    )
    return torch.cat([causal(*of) for of in zip(q, k, v, strict=True)], dim=1).view(rows, length, -1)
