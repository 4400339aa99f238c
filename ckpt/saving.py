"""Saving: all ranks check and agree, each writes its own file into the stage, rank 0 writes what describes them and commits."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from ckpt.commit import Stage, next_sequence, retain
from ckpt.hdf5 import INDEX_NAME, index_image
from ckpt.layout import Box, assign, cover_error
from ckpt.manifest import FILE_NAME, File, Manifest, Tensor, encode, encode_meta
from ckpt.ranks import Ranks, Solo
from ckpt.tensors import Local, inspect
from ckpt.writer import Written, write_file, write_rank_file
from collectives.dtypes import TABLE


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    comm: Ranks | None,
    meta: Mapping[str, Any] | None = None,
    keep: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint as the folder `path`, completely or not at all. Collective over `comm`; None is a process alone.

    `tensors`: name -> array, which is the same on all ranks and written by one of them, or `Shard`, this rank's box of a tensor
    that the ranks' boxes cover exactly. Arrays are contiguous NumPy arrays or torch CPU tensors. A "/" in a name makes HDF5 groups.
    `meta`: a JSON-like dict; rank 0's is kept. `keep`: so many complete checkpoints stay in the folder of `path`, older ones are
    removed. `overwrite`: replace a checkpoint of that name.
    Returns the absolute path, which other nodes may see a moment later.

    Raises on all ranks, with nothing written: ValueError or TypeError if the tensors cannot be used or do not fit between the
    ranks, FileExistsError if `path` exists. OSError on all ranks if one cannot write; then the stage is gone, and what was there
    before still stands.
    """
    comm = Solo() if comm is None else comm
    with comm.together("ckpt.save"):
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; expected at least 1, or None to keep all")
        held = inspect(tensors)
        encode_meta(meta or {})
    boxes = _agree(held, comm)
    mine = _mine(held, boxes, comm)

    stage: Stage | None = None
    final = None
    with comm.together("ckpt.save"):
        if comm.rank == 0:
            stage = Stage.open(_checked_path(path), overwrite=overwrite)
            final = stage.final
    folder, final = comm.broadcast_object((stage.path, final) if stage else None)
    try:
        with comm.together("ckpt.save"):
            written = write_rank_file(folder / f"rank-{comm.rank:05d}.h5", mine)
        reports = comm.all_gather_object(written)
        with comm.together("ckpt.save"):
            if stage is not None:
                _describe(stage.path, held, reports, meta or {}, next_sequence(stage.final.parent))
                stage.publish(overwrite=overwrite)
                if keep is not None:
                    retain(stage.final, keep)
    except BaseException:
        if stage is not None:
            stage.discard()
        raise
    return final


def _checked_path(path: str | os.PathLike[str]) -> Path:
    final = Path(os.path.abspath(path))
    if final.name.startswith(".") or final.name in ("", "latest"):
        raise ValueError(
            f"{final} cannot be a checkpoint's name: it is empty, hidden, or the name of the file `latest`"
        )
    return final


def _agree(held: list[Local], comm: Ranks) -> list[dict[str, Box]]:
    """Each rank's filled boxes of sharded tensors, after a check that all ranks mean the same tensors and cover them."""
    descriptions = [local.description for local in held]
    boxes = {local.name: local.box for local in held if not local.whole and local.box.size}
    digest = xxhash.xxh3_128_hexdigest(repr(descriptions).encode())
    gathered = comm.all_gather_object((digest, boxes))
    if len({digest for digest, _ in gathered}) > 1:
        everyone = comm.all_gather_object(descriptions)
        with comm.together("ckpt.save"):
            raise ValueError(_difference(everyone))
    all_boxes = [boxes for _, boxes in gathered]
    with comm.together(
        "ckpt.save"
    ):  # all ranks find the same: nobody has to tell the others, but it is to be raised as one
        for local in held:
            if not local.whole:
                owners = [rank for rank, theirs in enumerate(all_boxes) if local.name in theirs]
                found = [all_boxes[rank][local.name] for rank in owners]
                if problem := cover_error(local.shape, found, [f"rank {rank}" for rank in owners]):
                    raise ValueError(f"tensor {local.name!r}: {problem}")
    return all_boxes


def _difference(everyone: list[list[tuple]]) -> str:
    """A line that says in what the ranks' tensors differ first."""
    first = {name: rest for name, *rest in everyone[0]}
    for rank, theirs in enumerate(everyone):
        other = {name: rest for name, *rest in theirs}
        for name in sorted(first.keys() | other.keys()):
            if name not in other or name not in first:
                has, lacks = (0, rank) if name in first else (rank, 0)
                return f"the ranks save different tensors: rank {has} has {name!r}, rank {lacks} has not"
            if first[name] != other[name]:
                kinds = [
                    f"{dtype} {shape}" + ("" if whole else " in shards")
                    for dtype, shape, whole in (first[name], other[name])
                ]
                return (
                    f"the ranks save different tensors: {name!r} is {kinds[0]} on rank 0, but {kinds[1]} on rank {rank}"
                )
    raise AssertionError("the digests differ, the descriptions do not")


def _mine(held: list[Local], boxes: list[dict[str, Box]], comm: Ranks) -> list[Local]:
    """What this rank writes: its shards, and its share of the tensors that all hold."""
    itemsize = {local.name: TABLE[local.dtype].itemsize for local in held}
    loads = [sum(box.size * itemsize[name] for name, box in theirs.items()) for theirs in boxes]
    owner = assign({local.name: local.array.nbytes for local in held if local.whole and local.box.size}, loads)
    return [local for local in held if (owner.get(local.name) == comm.rank if local.whole else local.box.size > 0)]


def _describe(
    folder: Path, held: list[Local], reports: list[Written | None], meta: Mapping[str, Any], sequence: int
) -> None:
    """Write the index and the manifest of the finished rank files."""
    files: list[File] = []
    blocks: dict[str, list] = {local.name: [] for local in held}
    for report in reports:
        if report is not None:
            for name, block in report.blocks.items():
                blocks[name].append(replace(block, file=len(files)))
            files.append(report.file)
    tensors = {local.name: Tensor(local.name, local.dtype, local.shape, tuple(blocks[local.name])) for local in held}
    manifest = Manifest(tuple(files), tensors, dict(meta), sequence, time.time())
    scalars = {local.name: local.array for local in held if not local.shape}
    index = index_image(manifest, scalars)
    write_file(folder / INDEX_NAME, index)
    manifest = replace(manifest, files=(*files, File(INDEX_NAME, len(index), {})))
    write_file(folder / FILE_NAME, encode(manifest))
