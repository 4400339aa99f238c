"""Imports: makes a checkpoint from the tensors of safetensors files or of a torch `.pt`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckpt.convert.formats import safetensors, torch_file
from ckpt.convert.rewriting import write_checkpoint
from ckpt.format.manifest import MAX_NAME, name_error
from ckpt.reading.sources import PieceBuffer, Source, from_file, matching
from ckpt.saving.placement import Files
from ckpt.storage.local_path import LocalFile, open_given
from ckpt.storage.places import local_path
from ckpt.storage.progress import Progress, no_progress
from collectives.arrays.dtypes import DTYPES

_MAX_REPEATS, _MORE_BYTES = 8, 1 << 30  # tensors that share a storage, or are expanded, have more bytes than their file


def import_file(
    file: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    only: str | Sequence[str] | None = None,
    prefix: str = "",
    meta: Mapping[str, Any] | None = None,
    files: Files = "one",
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Make the checkpoint `path` from the tensors of `file`, bit for bit, and return its absolute path.

    Args:
        file: `*.safetensors`; a folder with `model.safetensors` or `model.safetensors.index.json`, or such an index: read 32 MiB at a
            time. Or torch's `*.pt`, `*.pth`, `*.bin`, `*.ckpt`, mapped and read by `torch.load(weights_only=True)`, which runs no
            code of the file; dicts and lists in it become paths, "optimizer/state/0/exp_avg", and the numbers and texts among the
            tensors become `meta["torch"]`, by their paths.
        only: a pattern such as "blocks.*", or several, of the names in the file; None: all.
        prefix: added before the names: "model/" turns "embed.weight" into "model/embed.weight".
        meta: the meta of the checkpoint, such as {"step": 100}.
        files: number of data files of about the same size, or "one".
        overwrite: replace a checkpoint of that name; other folders are never replaced.
        progress: a function that gets the number of bytes read, from the file or back from the checkpoint, since its last call.

    Expanded tensors of torch, which repeat their elements, and tensors that share a storage, are written in full: up to eight times the
    bytes of the file and 1 GiB.

    The new files are read back and compared with their checksums before the checkpoint exists. Raises ValueError if the file is
    damaged, of another format, has no tensors, or has values that a checkpoint cannot store; FileExistsError; OSError.
    """
    given = local_path(file, "file", "a file or a folder on a disk")
    with ExitStack() as opened:
        if given.suffix in torch_file.SUFFIXES and not given.is_dir():
            sources, others = _from_torch(given, only, prefix)
        else:
            sources, others = _from_safetensors(given, only, prefix, opened), {}
        if not sources:
            raise ValueError(f"{file} holds no tensor: there is nothing to import")
        meta = ({"torch": others} if others else {}) | dict(meta or {})
        return write_checkpoint(path, sources, files=files, meta=meta, overwrite=overwrite, progress=progress)


def _from_torch(file: Path, only: str | Sequence[str] | None, prefix: str) -> tuple[list[Source], dict[str, Any]]:
    tensors, others = torch_file.read(file)
    _check_lengths(file, tensors)
    buffer = PieceBuffer()
    names = sorted(matching(list(tensors), only))
    sources = [torch_file.source_of(tensors[name], prefix + name, buffer) for name in names]
    _check_repeats(file, sources)
    return sources, others


def _from_safetensors(path: Path, only: str | Sequence[str] | None, prefix: str, opened: ExitStack) -> list[Source]:
    if not path.is_dir() and path.suffix not in (".safetensors", ".json"):
        suffixes = ", ".join((".safetensors", ".json", *torch_file.SUFFIXES))
        raise ValueError(f"{path} has the suffix {path.suffix!r}; expected one of {suffixes}, or a folder")
    found: dict[str, tuple[str, safetensors.StoredTensor]] = {}
    for file, wanted in safetensors.files_of(path):
        places = safetensors.places(file)
        _check_lengths(file, places)
        safetensors.check_index(file, wanted, list(places))
        found |= {name: (file, place) for name, place in places.items() if wanted is None or name in wanted}
    buffer, sources = PieceBuffer(), []
    files: dict[str, LocalFile] = {}
    for name in sorted(matching(list(found), only)):
        file, place = found[name]
        dtype = safetensors.DTYPES.get(place.dtype)
        if dtype not in DTYPES:
            raise ValueError(
                f"{safetensors.some([name])} in {file} has dtype {place.dtype}; a checkpoint has one of {', '.join(DTYPES)} (only= "
                "leaves it out)"
            )
        if file not in files:
            files[file] = LocalFile(open_given(file))
            opened.callback(files[file].close)
        sources.append(from_file(files[file], place.position, file, prefix + name, dtype, place.shape, buffer))
    return sources


def _check_repeats(file: Path, sources: Sequence[Source]) -> None:
    """ValueError for tensors that repeat the bytes of the file again and again."""
    nbytes, of_file = sum(source.nbytes for source in sources), file.stat().st_size
    if nbytes > (most := _MAX_REPEATS * of_file + _MORE_BYTES):
        raise ValueError(
            f"{file} has {of_file:,} bytes, and its tensors share or repeat them to {nbytes:,}; expected at most {most:,}: choose some "
            "of them by only="
        )


def _check_lengths(file: str | os.PathLike[str], names: Iterable[str]) -> None:
    """ValueError for a name that no checkpoint can have, and in which it would take long to look for patterns."""
    if too_long := next((name for name in names if len(name) > MAX_NAME), None):
        raise ValueError(f"{os.fspath(file)}: {name_error(too_long)}")
