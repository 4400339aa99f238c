"""Loading: matches the requested tensors with the stored ones, then reads each rank's boxes into its arrays."""

import difflib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt.format.boxes import pieces
from ckpt.format.manifest import CheckpointError, Manifest, Tensor, named, unmatched_error
from ckpt.garbage import no_collections
from ckpt.ranks import Ranks, ranks_of
from ckpt.reading.casting import cast as cast_to
from ckpt.reading.reader import Reader
from ckpt.saving.background import wait_before_load
from ckpt.storage.catalog import check_there, manifest_bytes, none_usable, parse_manifest
from ckpt.storage.places import Paths, Place, copies_of
from ckpt.tensors import Local, LocalBox, inspect
from collectives.arrays.dtypes import DTYPES

_DOING = "ckpt.load"
_MAX_NAMES = 5  # in one message
_CAST_ELEMENTS = 1 << 20  # elements converted at a time


@no_collections()
def load(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    comm: Ranks | None = None,
    strict: bool = True,
    only: str | Sequence[str] | None = None,
    cast: bool = False,
    verify: bool = True,
    copies: Paths | None = None,
) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint `path`, a folder or a URL, and return its `meta`. Collective over `comm`; None means
    only this process.

    `tensors`: name -> a writable array for the whole tensor, each element with memory of its own; or a `Shard`, any box of it, for any
    boxes and any number of ranks of the save; or a list of Shards, which may be empty. The ranks may request different tensors.
    `strict`: requested names that are not stored, and stored names that are not requested, are an error; otherwise the former keep
    their values and the latter are ignored. `only`: a pattern such as "model/*", or several; all tensors whose name matches none of
    them are ignored. A pattern that matches no stored tensor is an error, also if not `strict`.
    `cast`: convert between floating dtypes, and between complex dtypes, if requested and stored dtypes differ: like NumPy's `astype`,
    and to float8 like torch, where 500 becomes 448 in float8_e4m3fn.
    `verify`: compare every chunk read with its checksum.
    `copies`: the argument `copies` of `save`. If the checkpoint is missing or damaged for any rank, rank 0 gives a RuntimeWarning, and
    all ranks read the copy in the first place instead, then in the next one. Copies are found by the name; a checkpoint of another save
    is skipped. A save in the background of this checkpoint by the same ranks, or by this process, is waited for.

    Raises CheckpointError on all ranks if the checkpoint is missing, damaged or does not fit in names, shapes or dtypes. Names,
    shapes and dtypes are checked before any array is written; damage found later leaves the arrays partly overwritten.
    """
    comm = ranks_of(comm)
    with comm.together(_DOING):
        places = copies_of(path, copies)
        held = inspect(tensors, writable=True)
    places = [places[0], *comm.broadcast_object(places[1:])]  # those of rank 0, so that all ranks read the same copies
    for place in places:
        wait_before_load(place, comm)
    known: bytes | None = None
    problems: list[str] = []
    for place, following in zip(places, (*places[1:], None), strict=True):
        try:
            known, manifest = _manifest_at(place, known, comm)
        except (CheckpointError, OSError) as error:
            failure: Exception = error
        else:
            with comm.together(_DOING):  # copies would have the same problem
                wanted = _match(place, manifest, held, strict=strict, only=only, cast=cast)
            try:
                with comm.together(_DOING):
                    if comm.rank == 0:
                        check_there(place, manifest.files)
                with comm.together(_DOING), Reader(place, manifest, verify=verify) as reader:
                    for local in wanted:
                        for part in local.boxes:
                            _fill(part, manifest.tensors[local.name], reader)
                            if part.bring is not None:
                                part.bring()
                return manifest.meta
            except (CheckpointError, OSError) as error:
                failure = error
        if len(places) == 1:
            raise failure
        problems.append(str(failure).removeprefix(f"{_DOING}: "))
        with comm.together(_DOING):
            if following is None:
                raise none_usable(problems) from failure
            if comm.rank == 0:
                warnings.warn(f"{problems[-1]}; going on with the copy {following}", RuntimeWarning, stacklevel=3)
    raise AssertionError("the last place returns or raises")


def _manifest_at(place: Place, known: bytes | None, comm: Ranks) -> tuple[bytes, Manifest]:
    """The manifest at `place`: its bytes, and parsed. CheckpointError unless it is `known`, the manifest of this save."""
    data = None
    with comm.together(_DOING):
        if comm.rank == 0:
            data = manifest_bytes(place)
            if known is not None and data != known:
                raise CheckpointError(f"{place} is from another save: it is no copy")
    # Only one rank reads it, because thousands of readers are a burden for the file system.
    data = comm.broadcast_object(data)
    with comm.together(_DOING):
        return data, parse_manifest(place, data)


def _fill(part: LocalBox, tensor: Tensor, reader: Reader) -> None:
    """Read a box of `tensor`, and convert it if necessary."""
    if part.array.dtype == DTYPES[tensor.dtype].numpy:
        reader.fill(part.array, tensor, part.box)
        return
    for piece in pieces(part.box, _CAST_ELEMENTS):
        stored = np.empty(piece.shape, DTYPES[tensor.dtype].numpy)
        reader.fill(stored, tensor, piece)
        part.array[piece.relative_to(part.box.offset).slices] = cast_to(stored, part.array.dtype)


def _match(
    folder: Place,
    manifest: Manifest,
    asked: list[Local],
    *,
    strict: bool,
    only: str | Sequence[str] | None,
    cast: bool,
) -> list[Local]:
    """The tensors of `asked` that are stored; CheckpointError unless patterns, names (if `strict`), shapes and dtypes fit."""
    stored = set(named(manifest.tensors, only))
    if only is not None:
        counting = set(named([local.name for local in asked], only))
        asked = [local for local in asked if local.name in counting]
    if strict:
        names = {local.name for local in asked}
        problems = []
        if missing := sorted(names - stored):
            problems.append(f"it does not hold {_listed(missing, stored)}")
        if extra := sorted(stored - names):
            problems.append(
                f"it holds {_listed(extra, names)}, which `tensors` does not name (strict=False ignores them)"
            )
        if problems:
            raise CheckpointError(f"{folder}: " + "; ".join(problems))
    if problem := unmatched_error(list(manifest.tensors), only):
        raise CheckpointError(f"{folder}: {problem}")
    wanted = [local for local in asked if local.name in stored]
    for asked_for in (local.description for local in wanted if local.description is not None):
        tensor = manifest.tensors[asked_for.name]
        if tensor.shape == asked_for.shape and tensor.dtype == asked_for.dtype:
            continue
        kind = DTYPES[tensor.dtype].kind
        converts = kind in ("float", "complex") and DTYPES[asked_for.dtype].kind == kind
        if tensor.shape != asked_for.shape or not (cast and converts):
            hint = " (cast=True converts it)" if tensor.shape == asked_for.shape and converts else ""
            raise CheckpointError(
                f"{folder}: tensor {tensor.name!r} is {tensor.dtype} {tensor.shape} there; "
                f"expected {asked_for.dtype} {asked_for.shape}{hint}"
            )
    return wanted


def _listed(names: list[str], others: Iterable[str]) -> str:
    """Up to five of `names`, each with the most similar of `others`, in case it is misspelled."""
    others = list(others)
    parts = []
    for name in names[:_MAX_NAMES]:
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
        parts.append(f"{name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    more = len(names) - _MAX_NAMES
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")
