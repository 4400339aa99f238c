"""A checkpoint rewritten in other files, offline: for a file system that wants few large files, or readers that want many."""

import os
from pathlib import Path

from ckpt.convert.rewriting import write_checkpoint
from ckpt.convert.sources import PieceBuffer, from_checkpoint
from ckpt.reading.reader import Reader
from ckpt.saving.placement import Files
from ckpt.saving.save import checked_path
from ckpt.storage.catalog import read_manifest
from ckpt.storage.places import absolute
from ckpt.storage.progress import Progress, no_progress


def reshard(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    files: Files,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Write the checkpoint `path` again as `out`, in so many data files of about the same size; returns its absolute path.

    Tensors, meta and axes stay as they are. The tensors follow each other, sorted by name, and are cut where a file is full, between
    rows of the first dimension longer than 1: so a file holds whole tensors but for the first and the last. 32 MiB of memory do
    for tensors of any size. `path` may be a URL. All that is read is compared with its checksums, and all that was written too, before
    `out` exists.

    `files`: a number, or "one". There are fewer where there are not so many rows. `out`: beside `path`, it takes its place in the
    order of checkpoints, so that an old one does not become the newest; elsewhere it is the newest there. With `overwrite` it may
    be `path` itself; what is no checkpoint is never replaced.

    `progress` is told of each so many bytes more that were read, from `path` or back from `out`.

    Raises ValueError for arguments that do not fit, CheckpointError for damage, FileExistsError, OSError.
    """
    folder, final = absolute(path), checked_path(out)
    manifest = read_manifest(folder)
    beside = isinstance(folder, Path) and os.path.realpath(folder.parent) == os.path.realpath(final.parent)
    buffer = PieceBuffer()
    with Reader(folder, manifest, verify=True) as reader:
        return write_checkpoint(
            final,
            [from_checkpoint(reader, tensor, name, buffer) for name, tensor in manifest.tensors.items()],
            files=files,
            meta=manifest.meta,
            overwrite=overwrite,
            sequence=manifest.sequence if beside else None,
            progress=progress,
        )
