"""Compares every byte of a checkpoint with its manifest: see [Note: every byte] in manifest.py."""

import os

from ckpt.check.inspecting import look, need_folder
from ckpt.format.manifest import CheckpointError
from ckpt.reading.reader import is_replaced
from ckpt.storage.catalog import read_manifest
from ckpt.storage.checksums import Damage, verify_files
from ckpt.storage.places import absolute
from ckpt.storage.progress import Progress, no_progress


def verify(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    hdf5: bool = False,
    progress: Progress = no_progress,
) -> list[Damage]:
    """All damage in the checkpoint `path`, also in bytes that readers do not need; an empty list if it is undamaged.

    Reads every file once, `threads` files at a time (None: the number of cores), in 4 MiB of memory each. `hdf5`: also report problems
    for other tools (see `ckpt.look`), as bytes 0 to 0 of a file. `progress` gets the number of bytes checked since its last call, from
    any thread. CheckpointError if the manifest cannot be used, if a file is missing or of another size, or if another save replaces the
    checkpoint meanwhile.
    """
    folder = absolute(path)
    if hdf5:
        need_folder(folder)
    manifest = read_manifest(folder)
    damage = verify_files(folder, manifest, threads=threads, progress=progress)
    if damage:
        try:
            replaced = is_replaced(folder, manifest)
        except (CheckpointError, OSError):
            replaced = False
        if replaced:
            raise CheckpointError(f"{folder} was replaced by another save while it was verified: verify it again")
    return damage + [Damage(file, 0, 0, tensor, problem) for file, tensor, problem in (look(folder) if hdf5 else ())]
