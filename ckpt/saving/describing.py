"""What describes the data files of a checkpoint: the manifest, which we go by, and the index for everybody else."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ckpt.format.boxes import Shape
from ckpt.format.hdf5 import INDEX_NAME, index_image
from ckpt.format.manifest import FILE_NAME, Block, Dataset, File, Manifest, Tensor, encode
from ckpt.format.validation import file_of
from ckpt.saving.placement import DataFile
from ckpt.saving.writer import Checksums, describe
from ckpt.storage.local import write_file


class Described(Protocol):
    """A tensor of which a checkpoint is made."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def axes(self) -> tuple[str | None, ...] | None: ...


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is to hold, and where."""

    tensors: Sequence[Described]
    files: Sequence[DataFile]
    meta: dict[str, Any]


def write_index(folder: Path, contents: Contents, scalars: Mapping[str, np.ndarray]) -> None:
    """The index, of data files that may still be in the making. `scalars`: the values of the 0-D tensors."""
    files = [
        File(file.name, 0, {dtype: Dataset(0, count) for dtype, count in file.elements.items()})
        for file in contents.files
    ]
    write_file(folder / INDEX_NAME, index_image(_manifest(contents, files, None), scalars))


def write_manifest(
    folder: Path, contents: Contents, reports: Sequence[tuple[dict[str, Any] | None, Checksums]], *, sequence: int
) -> None:
    """The manifest of finished files. `reports`: of each writer the file that it answers for, if any, and its checksums."""
    made = {entry["name"]: file_of(entry) for entry, _ in reports if entry is not None}
    files = [made[file.name] for file in contents.files]
    manifest = _manifest(contents, [*files, describe(folder / INDEX_NAME, {})], [sums for _, sums in reports])
    write_file(folder / FILE_NAME, encode(replace(manifest, sequence=sequence, saved=time.time())))


def _manifest(contents: Contents, files: Sequence[File], sums: Sequence[Checksums] | None) -> Manifest:
    """`sums`: of each writer's blocks; None before they are known."""
    blocks: dict[str, list[Block]] = {tensor.name: [] for tensor in contents.tensors}
    for number, file in enumerate(contents.files):
        for writer, items in file.items.items():
            for at, (item, start) in enumerate(items):
                blocks[item.name].append(Block(number, start, item.box, sums[writer][at] if sums else ""))
    tensors = {
        tensor.name: Tensor(tensor.name, tensor.dtype, tensor.shape, tuple(blocks[tensor.name]), tensor.axes)
        for tensor in contents.tensors
    }
    return Manifest(tuple(files), tensors, contents.meta)
