"""Named axes over the ranks of a communicator, and the communicators of every combination of axes."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from math import prod

import numpy as np

from collectives.communicator.communicator import Communicator


class Mesh:
    """A grid of ranks: `Mesh(comm, {"dp_replicate": 2, "dp_shard": 4})["dp_shard"]` is this rank's group of 4 along that axis.

    `mesh["dp_shard", "cp"]` is this rank's group along both axes: the ranks whose coordinates differ from this rank's only in these
    axes, in the mesh's order. `mesh[()]` is this rank alone. A look-up is local, because a mesh makes all its communicators at once.

    Sizes are in order from the slowest to the fastest axis: ranks along the last axis are consecutive. One size may be -1, which stands
    for the remaining factor. Collective: all ranks of `comm` create the mesh with the same sizes in the same order. For k axes longer
    than 1 it makes 2^k - 1 communicators, one for each set of these axes except the full set, whose communicator is `comm` itself.
    Axes of size 1 add no communicator. Several meshes of the same ranks may exist. `beside`: one of them, to be freed last; for groups
    that it has this mesh uses its communicators.

    ValueError on all ranks if the sizes do not fit the number of ranks or differ between the ranks.
    """

    def __init__(self, comm: Communicator, axes: Mapping[str, int], *, beside: "Mesh | None" = None) -> None:
        self.comm = comm
        with comm.together():
            self.axes = _fit(dict(axes), comm.size)
            if beside is not None and beside.comm is not comm:
                raise ValueError(f"{beside!r} has another communicator; expected a mesh of the same one")
        # Ranks with different axes would split in different orders and wait for each other forever.
        meshes = comm.all_gather_object(repr(self))
        for rank, other in enumerate(meshes):
            if other != meshes[0]:
                with comm.together():
                    raise ValueError(
                        f"rank 0 has {meshes[0]}, rank {rank} has {other}; expected the same axes in the same order"
                    )
        grid = np.arange(comm.size).reshape(tuple(self.axes.values()))
        place = np.unravel_index(comm.rank, grid.shape)
        self.coordinates: dict[str, int] = {name: int(i) for name, i in zip(self.axes, place, strict=True)}
        self._groups: dict[tuple[str, ...], Communicator] = {}
        self._made: list[Communicator] = []
        # By the first rank of each rank's group.
        self._known: dict[bytes, Communicator] = (
            {np.zeros_like(grid).tobytes(): comm} if beside is None else dict(beside._known)
        )
        long = self._long(self.axes)
        for names in (some for count in range(len(long) + 1) for some in combinations(long, count)):
            firsts = grid[tuple(slice(0, 1) if name in names else slice(None) for name in self.axes)]
            firsts = np.broadcast_to(firsts, grid.shape)
            if (key := firsts.tobytes()) not in self._known:
                self._known[key] = comm.split(firsts[place])
                self._made.append(self._known[key])
            self._groups[names] = self._known[key]

    def __getitem__(self, names: str | tuple[str, ...]) -> Communicator:
        names = names if isinstance(names, tuple) else (names,)
        for name in names:
            if name not in self.axes:
                raise KeyError(f"mesh has no axis {name!r}; its axes are {', '.join(self.axes)}")
        in_order = tuple(name for name in self.axes if name in names)
        if names != in_order:
            expected = ", ".join(map(repr, in_order))
            raise KeyError(f"mesh axes {names}: expected each once and in the order of the mesh: mesh[{expected}]")
        return self._groups[self._long(names)]

    def free(self) -> None:
        """Free the communicators that the mesh made; `comm`, and those of `beside`, stay as they are. Collective."""
        for group in self._made:
            group.free()

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"

    def _long(self, names: Iterable[str]) -> tuple[str, ...]:
        """The axes that are longer than 1; the other axes change no group."""
        return tuple(name for name in names if self.axes[name] > 1)


def _fit(axes: dict[str, int], num_ranks: int) -> dict[str, int]:
    shown, sizes = " x ".join(f"{name}={size}" for name, size in axes.items()), list(axes.values())
    whole = all(isinstance(size, int | np.integer) for size in sizes)
    if not axes or not whole or any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"mesh {shown or '(no axes)'}: expected whole numbers of at least 1, of which one may be -1")
    known = prod(int(size) for size in sizes if size != -1)
    if num_ranks % known or (-1 not in sizes and known != num_ranks):
        raise ValueError(f"mesh {shown} makes {known} ranks, but the communicator has {num_ranks}")
    return {name: num_ranks // known if size == -1 else int(size) for name, size in axes.items()}
