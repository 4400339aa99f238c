"""What a method of compression does. All matrices are 2-D, fp32, contiguous, and on one device."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from collectives import Communicator


class Method(Protocol):
    """A method. Equal arguments make equal objects, and `repr` shows them."""

    @property
    def exact_steps(self) -> int:
        """The number of first reductions, which are exact."""

    @property
    def error_feedback(self) -> bool:
        """Whether a contributor keeps what a message lacks, and adds it to its next gradient."""

    @property
    def clip_norm(self) -> float | None:
        """The norm to which the mean will be clipped, for [Note: clipping] in compression.py; None: contributors do not clip."""

    def takes(self, rows: int, columns: int) -> bool:
        """Whether a matrix of this shape is compressed: only if its messages are shorter than the matrix."""

    def numel(self, rows: int, columns: int, contributors: int) -> int:
        """The elements of the code of a matrix."""

    def basis(self, columns: int, name: str) -> torch.Tensor | None:
        """What the contributors know of a matrix before the first reduction; None: the method needs nothing."""

    def begin(self, matrices: Sequence[torch.Tensor], bases: Sequence[Any]) -> list[torch.Tensor]:
        """For each matrix what is averaged over the contributors first; an empty list: nothing."""

    def code(
        self, matrices: Sequence[torch.Tensor], means: Sequence[torch.Tensor], across: Communicator
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """For each matrix its code, 1-D int32, the same bits on all ranks of `across`, and what `residual` needs. Collective.

        `means`: the averages of what `begin` returned, the same on all ranks, perhaps not finite.
        """

    def residual(self, matrix: torch.Tensor, own: Any, out: torch.Tensor) -> None:
        """Fill `out` with the part of this rank's matrix that its contribution to the code lacks."""

    def decode(self, code: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with the mean of the contributions. The same code gives the same bits on all ranks."""

    def next_basis(self, code: torch.Tensor, basis: Any) -> None:
        """Update the basis of a matrix, in place."""


def check_arguments(caller: str, *, exact_steps: object, error_feedback: object) -> None:
    """The checks of arguments that all methods have. TypeError or ValueError."""
    if type(error_feedback) is not bool:
        raise TypeError(f"{caller}: error_feedback is {error_feedback!r}; expected True or False")
    check_number(caller, "exact_steps", exact_steps, least=0)


def check_number(caller: str, name: str, value: object, *, least: int) -> None:
    """TypeError for anything but a whole number, ValueError for one below `least`."""
    if type(value) is not int:
        raise TypeError(f"{caller}: {name} is {value!r}; expected a whole number")
    if value < least:
        raise ValueError(f"{caller}: {name} is {value}; expected at least {least}")
