"""PowerSGD: a matrix as the product of two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727).

M: a contributor's gradient with its residual, (m, n). Q: the basis of the last reduction, (n, r). One power iteration:

    P = mean of M Q            (m, r), the first message
    P = orthonormal columns of P, the same bits on all ranks
    Q = mean of M^T P          (n, r), the second message
    the mean of M is about P Q^T, and M - P (M^T P)^T is this contributor's residual

P and Q are stored as rows, (r, m) and (r, n): in a product with the large matrix long rows take a third of the time of short ones.

The paper's residual is M - P Q^T with the mean Q. It has the same mean over the contributors, on which alone the next P and Q depend.
But it also collects the difference between the contributors' gradients, which grows from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collectives import Communicator
from mpitrain.placement.fills import Normal, fill_
from mpitrain.sharding.compression.method import check_arguments, check_number

_NOISE = 1e-6
"""A row of P that is shorter than this share of its length before the projection consists of rounding errors."""


@dataclass(frozen=True)
class PowerSGD:
    """The method: see `power_sgd`."""

    rank: int
    exact_steps: int
    error_feedback: bool
    seed: int
    clip_norm = None

    def takes(self, rows: int, columns: int) -> bool:
        return self.rank * (rows + columns) < rows * columns

    def numel(self, rows: int, columns: int, contributors: int) -> int:
        return self.rank * (rows + columns)

    def basis(self, columns: int, name: str) -> torch.Tensor:
        made = torch.empty(self.rank, columns)
        fill_(made, Normal(1.0), seed=self.seed, name=f"power_sgd/{name}")
        return made

    def begin(self, matrices: Sequence[torch.Tensor], bases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [basis @ matrix.t() for matrix, basis in zip(matrices, bases, strict=True)]

    def code(
        self, matrices: Sequence[torch.Tensor], means: Sequence[torch.Tensor], across: Communicator
    ) -> tuple[list[torch.Tensor], list[Any]]:
        lengths = [self.rank * matrix.shape[1] for matrix in matrices]
        own = torch.empty(sum(lengths), device=matrices[0].device) if matrices else torch.empty(0)
        # All ranks have the same means, so all leave the second message out.
        if is_finite := all(bool(mean.isfinite().all()) for mean in means):
            for mean, rows in zip(means, orthonormal([mean.cpu().numpy() for mean in means]), strict=True):
                mean.copy_(torch.from_numpy(rows))
        else:
            own.fill_(torch.nan)
        parts = [part.view(self.rank, -1) for part in own.split(lengths)]
        mean_of_parts = own
        if is_finite and matrices:
            for matrix, left, part in zip(matrices, means, parts, strict=True):
                torch.mm(left, matrix, out=part)
            mean_of_parts = own.clone()
            across.all_reduce(mean_of_parts, "avg")
        codes = [
            torch.cat([left.reshape(-1), right]).view(torch.int32)
            for left, right in zip(means, mean_of_parts.split(lengths), strict=True)
        ]
        return codes, list(zip(means, parts, strict=True))

    def residual(self, matrix: torch.Tensor, own: Any, out: torch.Tensor) -> None:
        left, right = own
        torch.addmm(matrix, left.t(), right, alpha=-1, out=out)

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        left, right = self._factors(code, out.shape[0])
        # Element by element, not by a matrix product: that may add in an order that depends on a rank's number of threads.
        torch.mul(left[0][:, None], right[0], out=out)
        for column, row in zip(left[1:], right[1:], strict=True):
            out.addcmul_(column[:, None], row)

    def next_basis(self, code: torch.Tensor, basis: torch.Tensor) -> None:
        _, right = self._factors(code, code.numel() // self.rank - basis.shape[1])
        largest = right.abs().amax(1, keepdim=True)
        # Powers of two: the lengths stay near 1 without rounding. A direction that found nothing keeps its old row.
        scaled = right / torch.exp2(torch.frexp(largest).exponent.float())
        basis.copy_(torch.where(largest > 0, scaled, basis))

    def _factors(self, code: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        factors = code.view(torch.float32)
        return factors[: self.rank * rows].view(self.rank, -1), factors[self.rank * rows :].view(self.rank, -1)


def power_sgd(rank: int = 4, *, exact_steps: int = 0, error_feedback: bool = True, seed: int = 0) -> PowerSGD:
    """PowerSGD (Vogels et al. 2019) for `compress_gradients`: each matrix is sent as two matrices with `rank` columns.

    A matrix of m x n is compressed if rank x (m + n) < m x n. `exact_steps`: the number of first reductions, which are exact.
    `error_feedback`: each contributor keeps what its message lacks, fp32, and adds it to its next gradient. `seed`: of the first basis
    of each matrix. TypeError for arguments of other types, ValueError for a rank below 1 or negative exact_steps.
    """
    check_number("power_sgd", "rank", rank, least=1)
    check_number("power_sgd", "seed", seed, least=0)
    check_arguments("power_sgd", exact_steps=exact_steps, error_feedback=error_feedback)
    return PowerSGD(rank, exact_steps, error_feedback, seed)


def orthonormal(matrices: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each matrix (r, m), float32, orthonormal rows with the same span; rows that depend on those before become zeros.

    Gram-Schmidt in fp64, projected twice (Giraud, Langou, Rozloznik 2005). NumPy adds in an order that depends on the shape alone, so
    ranks with other processors or numbers of threads get the same bits. LAPACK does not promise this.
    """
    of_length: dict[int, list[int]] = {}
    for at, matrix in enumerate(matrices):
        of_length.setdefault(matrix.shape[1], []).append(at)
    found: list[np.ndarray] = [np.empty(0)] * len(matrices)
    # Matrices of one length at once: a call of NumPy takes as long as 1,000 additions.
    for places in of_length.values():
        rows = np.stack([matrices[at] for at in places]).astype(np.float64)  # (matrices, r, m)
        for j in range(rows.shape[1]):
            one, before = rows[:, j], rows[:, :j]
            length = _norms(one)
            for _ in range(2 if j else 0):
                shares = np.add.reduce(before * one[:, None], axis=2)
                one -= np.add.reduce(before * shares[:, :, None], axis=1)
            left = _norms(one)
            counts = (left > _NOISE * length) & (left > 0)
            one *= np.divide(1.0, left, out=np.zeros_like(left), where=counts)
        for at, each in zip(places, rows.astype(np.float32), strict=True):
            found[at] = each
    return found


def _norms(rows: np.ndarray) -> np.ndarray:
    return np.sqrt(np.add.reduce(rows * rows, axis=1, keepdims=True))
