"""The two files that describe the data files of a checkpoint: the manifest for `ckpt`, the index for other tools."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckpt.format.boxes import Shape
from ckpt.format.hdf5 import INDEX_NAME, index_image
from ckpt.format.manifest import FILE_NAME, Manifest, StoredBlock, Tensor, encode
from ckpt.format.validation import check_readable, file_of
from ckpt.saving.placement import DataFile
from ckpt.saving.writer import Checksums, describe
from ckpt.storage.local import write_file
from collectives.version import release


class Described(Protocol):
    """A tensor that becomes part of a checkpoint."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def axes(self) -> tuple[str | None, ...] | None: ...


class Contents:
    """The tensors of an unfinished checkpoint in the form of its manifest, without the blocks' checksums, and its data files."""

    def __init__(self, tensors: Sequence[Described], files: Sequence[DataFile], meta: dict[str, Any]) -> None:
        self.files, self.meta = files, meta
        self.written: dict[int, list[StoredBlock]] = {}  # for each writer, in the order of its items
        blocks: dict[str, list[StoredBlock]] = {tensor.name: [] for tensor in tensors}
        for number, file in enumerate(files):
            for writer, items in file.items.items():
                made = self.written[writer] = []
                for name, _, box, start in items:
                    made.append(StoredBlock(number, start, box.offset, box.shape, ""))
                    blocks[name].append(made[-1])
        self.tensors = {
            tensor.name: Tensor(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                axes=tensor.axes,
                blocks=tuple(blocks[tensor.name]),
            )
            for tensor in tensors
        }


def write_index(folder: Path, contents: Contents, scalars: Mapping[str, bytes]) -> None:
    """Write the index. The data files may be unfinished. `scalars`: the values of the 0-D tensors."""
    lengths = {file.name: file.elements for file in contents.files}
    write_file(folder / INDEX_NAME, index_image(contents.tensors, lengths, contents.meta, scalars))


def write_manifest(
    folder: Path,
    contents: Contents,
    reports: Sequence[tuple[dict[str, Any] | None, Checksums]],
    *,
    sequence: int,
    num_ranks: int = 0,
) -> None:
    """Write the manifest of finished files. `reports`: for each writer its file, if it leads one, and its checksums. `num_ranks`: see
    `Manifest`. ValueError for a manifest that no reader would take."""
    made = {entry["name"]: file_of(entry) for entry, _ in reports if entry is not None}
    files = (*(made[file.name] for file in contents.files), describe(folder / INDEX_NAME, {}))
    for writer, blocks in contents.written.items():
        for block, checksums in zip(blocks, reports[writer][1], strict=True):
            block.checksums = checksums
    manifest = Manifest(
        files, contents.tensors, contents.meta, sequence, time.time(), num_ranks=num_ranks, release=str(release())
    )
    data = encode(manifest)
    check_readable(data)
    write_file(folder / FILE_NAME, data)
