"""One kind of state in a checkpoint: what of it is saved, and what is loaded. The other files of this folder are the kinds."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ckpt
from mpitrain.weights.meta.parts import part_of_meta


class StoredTensor(NamedTuple):
    """What a checkpoint says of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class There(NamedTuple):
    """The content of a checkpoint: its tensors by name, and its meta. `path`: for messages."""

    path: str
    tensors: dict[str, StoredTensor]
    meta: dict[str, Any]

    def part(self, name: str) -> Any:
        """What the meta has of one kind of state, such as "optimizer", or None. ckpt.CheckpointError if its types are wrong."""
        return part_of_meta(self.meta, name, self.path)


class Saved(Protocol):
    """One kind of state, such as the optimizer's. The calls of a save: `tensors`, `meta`. Those of a load: `room`, then `loaded`."""

    def tensors(self) -> Mapping[str, Any]:
        """The tensors to save, in the form of `ckpt.save`: those of this rank's stages of a pipeline."""

    def meta(self) -> Mapping[str, Any]:
        """What is saved beside the tensors: plain numbers and text, the same on all ranks."""

    def room(self, there: There) -> Mapping[str, Any]:
        """The tensors to fill, in the form of `ckpt.load`. ckpt.CheckpointError if the checkpoint does not fit."""

    def loaded(self, there: There) -> None:
        """Take over what `room` has got."""


def look(path: str, checkpoint: ckpt.Checkpoint, parts: Sequence[str] = ()) -> There:
    """The content of a checkpoint. ckpt.CheckpointError if the types of these parts of its meta are wrong: see `There.part`."""
    tensors = {entry.name: StoredTensor(entry.shape, str(entry.dtype)) for entry in checkpoint.values()}
    there = There(path, tensors, checkpoint.meta)
    for name in parts:
        there.part(name)
    return there
