"""Checkpoints that one process writes from sources, piece by piece: the common part of importing and resharding."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.check.verifying import verify
from ckpt.commit.atomic import Stage
from ckpt.format.manifest import (
    CheckpointError,
    encode_meta,
    file_entry,
    following,
    name_error,
    nesting_error,
    shape_error,
)
from ckpt.reading.sources import Source, SourcePart
from ckpt.saving.describing import Contents, write_index, write_manifest
from ckpt.saving.placement import Files, Item, cut_evenly, file_name, lay_out
from ckpt.saving.save import checked_path, discarding
from ckpt.saving.writer import Posix
from ckpt.storage.local import check_free, flush
from ckpt.storage.progress import Progress, no_progress
from collectives.arrays.dtypes import DTYPES


def write_checkpoint(
    path: str | os.PathLike[str],
    sources: Sequence[Source],
    *,
    files: Files,
    meta: Mapping[str, Any],
    overwrite: bool,
    sequence: int | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write `sources` as the checkpoint `path`. All bytes are read back and compared with their checksums before the commit.

    `files`: a number, or "one". `sequence`: the checkpoint's place in the order of its folder; None: the newest.
    Returns the absolute path. ValueError for invalid names or shapes, FileExistsError, OSError, CheckpointError.
    """
    if files != "one" and (type(files) is not int or files < 1):
        raise ValueError(f"files is {files!r}; expected 'one', or a number of at least 1")
    _check(sources)
    encode_meta(meta)
    shapes = [(source.shape, DTYPES[source.dtype].itemsize) for source in sources]
    cut = cut_evenly(shapes, 1 if files == "one" else int(files))
    boxes = [{sources[index].name: box for index, box in part.items()} for part in cut if part]
    stage = Stage(checked_path(path)).open(overwrite=overwrite)
    with discarding(stage):
        by_name = {source.name: source.watched(progress) for source in sources}
        plans, reports = [], []
        # Checked before the first write: a file of a few bytes may hold a tensor that repeats them to terabytes.
        check_free(stage.path, sum(source.nbytes for source in sources))
        for number, held in enumerate(boxes):
            parts = [SourcePart(by_name[name], box) for name, box in held.items()]
            items = [Item(part.name, part.dtype, part.box) for part in parts]
            plan = lay_out(file_name(files, number), {number: items})
            driver = Posix(stage.path / plan.name, plan, number)
            file = driver.prepare()
            assert file is not None
            reports.append((file_entry(file), driver.write(parts, file)))
            flush(stage.path / plan.name)
            plans.append(plan)
        contents = Contents(sources, plans, dict(meta))
        scalars = {source.name: bytes(source.read(0, 1)) for source in sources if not source.shape}
        write_index(stage.path, contents, scalars)
        order = following(stage.newest_sequence()) if sequence is None else sequence
        write_manifest(stage.path, contents, reports, sequence=order)
        if damage := verify(stage.path, progress=progress):
            raise CheckpointError(f"{stage.path} does not read back as it was written: {damage[0]}")
        stage.publish(overwrite=overwrite, newest=sequence is None)
    return stage.final


def _check(sources: Sequence[Source]) -> None:
    for source in sources:
        if problem := name_error(source.name):
            raise ValueError(problem)
        if problem := shape_error(source.shape, DTYPES[source.dtype].itemsize):
            raise ValueError(f"tensor {source.name!r}: {problem}")
    if problem := nesting_error(source.name for source in sources):
        raise ValueError(problem)
