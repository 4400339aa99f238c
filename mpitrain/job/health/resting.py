"""Bits of this rank's shards that change while no one writes them: from the end of one optimizer step to the beginning of the next."""

from collections.abc import Sequence
from typing import NamedTuple

from mpitrain.job.health.checksums import Checksum, checksums, flipped_bit
from mpitrain.job.health.holdings import Holding
from mpitrain.job.health.pieces import TensorRows


class Change(NamedTuple):
    """A tensor whose bits changed at rest. `bit`: of an element, if one flipped bit explains the change."""

    name: str
    dtype: str
    bit: int | None


class Resting:
    """The checksums of tensors that are at rest."""

    def __init__(self) -> None:
        self._taken: dict[TensorRows, Checksum] = {}

    @property
    def is_taken(self) -> bool:
        """Whether checksums wait for a comparison."""
        return bool(self._taken)

    def take(self, holdings: Sequence[Holding]) -> None:
        """Take the checksums: from now on no one may write the tensors until `compare` or `forget`."""
        self._taken = _sums(holdings)

    def forget(self) -> None:
        """The tensors are about to be written, or have been."""
        self._taken = {}

    def compare(self, holdings: Sequence[Holding]) -> tuple[dict[TensorRows, Checksum], list[Change]]:
        """The checksums now, and the tensors whose checksums have changed since `take`, which is over."""
        before, self._taken = self._taken, {}
        now = _sums(holdings)
        changes = []
        for holding in holdings:
            rows = holding.rows
            if before.get(rows, now[rows]) != now[rows]:
                bit, size = flipped_bit(before[rows], now[rows]), 8 * holding.tensor.itemsize
                changes.append(
                    Change(
                        rows.name, str(holding.tensor.dtype).removeprefix("torch."), None if bit is None else bit % size
                    )
                )
        return now, changes


def _sums(holdings: Sequence[Holding]) -> dict[TensorRows, Checksum]:
    found = checksums([holding.tensor for holding in holdings])
    return {holding.rows: checksum for holding, checksum in zip(holdings, found, strict=True)}
