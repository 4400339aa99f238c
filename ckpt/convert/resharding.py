"""Rewrites a checkpoint with another number of files, offline: for file systems that need few large files, or for more readers."""

import os
from pathlib import Path

from ckpt.convert.rewriting import write_checkpoint
from ckpt.reading.reader import Reader
from ckpt.reading.sources import PieceBuffer, from_checkpoint
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
    """Write the checkpoint `path` again as `out`, in `files` data files of about the same size; returns its absolute path.

    Tensors, meta and axes stay the same. The tensors follow each other, sorted by name, and are cut at the end of a file, between
    rows of the first dimension longer than 1. So all tensors of a file except the first and the last are whole. 32 MiB of memory are
    enough for tensors of any size. `path` may be a URL. Before `out` exists, all bytes read and all bytes written are compared with
    their checksums.

    `files`: a number, or "one". With too few rows there are fewer files. `out`: in the folder of `path` it gets the place of `path` in
    the order of checkpoints, so that an old one does not become the newest; in another folder it is the newest. With `overwrite` it may
    be `path` itself; other folders than checkpoints are never replaced.

    `progress`: a function that gets the number of bytes read, from `path` or back from `out`, since its last call.

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
