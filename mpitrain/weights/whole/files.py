"""The tensors of safetensors files by the names that the model has for them. The format: `ckpt.convert.formats.safetensors`.

This module has no MPI and no sharding.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors import safe_open

from ckpt.convert.formats import safetensors as format_
from ckpt.convert.formats.safetensors import check_index, files_of, some
from ckpt.storage.places import local_path

__all__ = ["FileTensor", "Rename", "find", "opened", "some"]

DTYPES = {name: getattr(torch, dtype) for name, dtype in format_.DTYPES.items() if hasattr(torch, dtype)}
"""torch's dtypes by the format's names. Dtypes that this version of torch lacks are left out."""

_EXPECTED = "a file or a folder on a disk"

Rename = Callable[[str], str | None] | Mapping[str, str | None]


class FileTensor(NamedTuple):
    """A tensor in a file, with its name in the file."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def opened(file: str) -> safe_open:
    """Open a file, and check its header. FileNotFoundError, OSError, or ValueError if it is damaged."""
    return format_.opened(file, "pt")


def find(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], rename: Rename | None
) -> dict[str, FileTensor]:
    """All tensors of a file, of several files, or of a folder, by the names that the model has for them.

    `rename`: from a file's names to the model's. A mapping keeps the names that it does not have; None drops a tensor.
    Raises ValueError for names that occur twice and for damaged files, OSError for files that cannot be read.
    """
    new_name = (lambda name: rename.get(name, name)) if isinstance(rename, Mapping) else rename or str
    entries: dict[str, FileTensor] = {}
    for file, only in _files(path):
        places = format_.places(file)
        check_index(file, only, list(places))
        for name, place in sorted(places.items()):
            renamed = new_name(name)
            if renamed is None or (only is not None and name not in only):
                continue
            if renamed in entries:
                other = entries[renamed]
                raise ValueError(f"{renamed} occurs twice: {other.name} of {other.file} and {name} of {file}")
            if place.dtype not in DTYPES:
                raise ValueError(f"{name} in {file} has dtype {place.dtype}; expected one of {', '.join(DTYPES)}")
            entries[renamed] = FileTensor(file, name, place.shape, DTYPES[place.dtype])
    return entries


def _files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[tuple[str, set[str] | None]]:
    """The files, each with the names of its tensors that are used; None: all."""
    if not isinstance(path, str | bytes | os.PathLike):
        return [(str(local_path(file, "path", _EXPECTED)), None) for file in path]
    return files_of(local_path(path, "path", _EXPECTED))
