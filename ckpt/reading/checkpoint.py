"""Reading a checkpoint without MPI and torch: `ckpt.open(path)` maps names to entries, which read the requested parts of a tensor."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.format.manifest import CheckpointError, Manifest
from ckpt.reading.entry import TensorEntry
from ckpt.reading.sources import matching
from ckpt.storage.catalog import none_usable, read_manifest
from ckpt.storage.places import Paths, Place, copies_of


class Checkpoint(Mapping[str, TensorEntry]):
    """A checkpoint on disk: a mapping from the names of its tensors, sorted, to `TensorEntry`. Made by `ckpt.open`."""

    def __init__(self, path: Place, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest

    @property
    def meta(self) -> dict[str, Any]:
        """The `meta` that `save` was given."""
        return self._manifest.meta

    @property
    def names(self) -> list[str]:
        return list(self)

    @property
    def saved(self) -> float:
        """The time of the save, in seconds since the epoch."""
        return self._manifest.saved

    @property
    def num_ranks(self) -> int:
        """The number of ranks that saved it; 0 if it is unknown, as of older checkpoints and of `import`."""
        return self._manifest.num_ranks

    @property
    def release(self) -> str:
        """The version and commit of this library that wrote it, such as "0.1.0 (commit 0123456789)"; "" if they are unknown."""
        return self._manifest.release

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._manifest.tensors.values())

    @property
    def files(self) -> dict[str, int]:
        """The files and their sizes in bytes."""
        return {file.name: file.nbytes for file in self._manifest.files}

    def to_jax(
        self, sharding: Any = None, *, only: str | Sequence[str] | None = None, verify: bool = True
    ) -> dict[str, Any]:
        """The tensors as a pytree of JAX arrays: "model/embed.weight" is `tree["model"]["embed.weight"]`. Needs JAX.

        Each device of this process gets its part of each tensor, and no other part is read. So each of several processes reads only
        the parts of its own devices. Dtypes are kept, 64-bit ones even if JAX has them turned off.

        `sharding`: a `jax.sharding.Sharding` for all tensors; or a function from a `TensorEntry` to a Sharding; or nested dicts of
        Shardings as in the result, where a group may have one for all its tensors. None: a whole array, on JAX's default device.
        `only`: a pattern such as "model/*", or several. `verify`: compare the chunks read with their checksums.

        Raises ValueError or TypeError before anything is read if a sharding is missing or does not fit a shape, or no name matches;
        CheckpointError for damage.
        """
        from ckpt.reading.jax_arrays import tree_of

        return tree_of({name: self[name] for name in matching(self.names, only)}, sharding, verify=verify)

    def __getitem__(self, name: str) -> TensorEntry:
        return TensorEntry(self.path, self._manifest, self._manifest.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.tensors)

    def __len__(self) -> int:
        return len(self._manifest.tensors)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors, {self.nbytes} bytes)"


def open_checkpoint(path: str | os.PathLike[str], *, copies: Paths | None = None) -> Checkpoint:
    """Open the checkpoint `path`, a folder or a URL. This only reads its manifest, and checks that its files exist.

    If another save replaces the checkpoint later, a read raises a CheckpointError that says so.

    `copies`: the argument `copies` of `save`. If the checkpoint cannot be opened, the first copy that can be is opened instead:
    `Checkpoint.path` is its path. Damage that a later read finds is an error, while `load` continues with a copy.

    CheckpointError if it is missing, incomplete, damaged or of a newer format.
    """
    places, problems = copies_of(path, copies), []
    for place in places:
        try:
            return Checkpoint(place, read_manifest(place))
        except (CheckpointError, OSError) as error:
            if len(places) == 1:
                raise
            problems.append(str(error))
    raise none_usable(problems)
