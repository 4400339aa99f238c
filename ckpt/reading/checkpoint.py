"""Looking into a checkpoint without MPI and torch: `ckpt.open(path)` maps names to entries that read what is asked of them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.convert.sources import matching
from ckpt.format.manifest import CheckpointError, Manifest
from ckpt.reading.entry import TensorEntry
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
        """When it was saved, in seconds since the epoch."""
        return self._manifest.saved

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

        Of each tensor every device of this process gets its part, and no other is read: with many processes, each of them reads
        what its own devices hold. The dtypes stay; 64-bit ones even where JAX has them turned off.

        `sharding`: a `jax.sharding.Sharding` for all tensors; or a function of a `TensorEntry` that returns one; or nested dicts of
        them as in the result, where a group may have one for all in it. None: where JAX puts an array by itself, whole.
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
    """Look into the checkpoint `path`, a folder or a URL: reads its manifest and checks that its files are there, nothing more.

    If another save replaces the checkpoint after that, reading from what was opened is a CheckpointError that says so.

    `copies`: the further places that `save` was given. If the checkpoint cannot be opened, its copy in the first of them that can is:
    `Checkpoint.path` says which. Damage found later, when tensors are read, is an error: `load` goes on with a copy then, too.

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
