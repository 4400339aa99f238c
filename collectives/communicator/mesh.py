"""Named axes over the ranks of a communicator."""

from collections.abc import Mapping
from math import prod

import numpy as np

from collectives.communicator.communicator import Communicator


class Mesh:
    """A grid of ranks: `Mesh(comm, {"dp_replicate": 2, "dp_shard": 4})["dp_shard"]` is this rank's group of 4 along that axis.

    Sizes run from the slowest axis to the fastest: ranks of the last axis are neighbours. One size may be -1: what is left.
    Collective: all ranks of `comm` create it, with the same sizes; ValueError that shows every factor where they do not fit.
    """

    def __init__(self, comm: Communicator, axes: Mapping[str, int]) -> None:
        self.comm = comm
        self.axes = _fit(dict(axes), comm.size)
        grid = np.arange(comm.size).reshape(tuple(self.axes.values()))
        place = np.argwhere(grid == comm.rank)[0]
        self.coordinates: dict[str, int] = {name: int(i) for name, i in zip(self.axes, place, strict=True)}
        self._groups: dict[str, Communicator] = {}
        for axis, name in enumerate(self.axes):
            groups = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
            color = int(np.argwhere(groups == comm.rank)[0][0])
            self._groups[name] = comm.split(color)

    def __getitem__(self, name: str) -> Communicator:
        if name not in self._groups:
            raise KeyError(f"mesh has no axis {name!r}; it has {', '.join(self._groups)}")
        return self._groups[name]

    def free(self) -> None:
        """Free the communicators of all axes. Collective."""
        for group in self._groups.values():
            group.free()
        self._groups.clear()

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"


def _fit(axes: dict[str, int], num_ranks: int) -> dict[str, int]:
    shown = " x ".join(f"{name}={size}" for name, size in axes.items())
    if not axes or any(size < 1 and size != -1 for size in axes.values()) or list(axes.values()).count(-1) > 1:
        raise ValueError(f"mesh {shown or '(no axes)'}: expected sizes of at least 1, one of them may be -1")
    known = prod(size for size in axes.values() if size != -1)
    if num_ranks % known or (-1 not in axes.values() and known != num_ranks):
        raise ValueError(f"mesh {shown} makes {known} ranks, but the communicator has {num_ranks}")
    return {name: num_ranks // known if size == -1 else size for name, size in axes.items()}
