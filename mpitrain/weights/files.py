"""Weights in safetensors files: which files, what is in them, how they are written. No MPI here, no sharding.

A file is 8 bytes, the length of a header; the header, JSON: for each tensor its dtype, shape and place; then the tensors' bytes end to
end. So a place is known before a value is there, and a tensor may be written, or read, piece by piece. A folder is as Hugging Face
ships it: `model.safetensors`, or several files and `model.safetensors.index.json`, which says where each tensor is.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
"""The format's names of dtypes."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Rename = Callable[[str], str | None] | Mapping[str, str | None]


class Entry(NamedTuple):
    """A tensor in a file, under the name it has there."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class FileTensor(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


# Reading


def opened(file: str) -> safe_open:
    """A file, its header read and checked. FileNotFoundError, OSError, or ValueError if it is damaged."""
    if os.path.isdir(file):
        raise ValueError(f"{file} is a folder; expected a safetensors file")
    if not os.path.exists(file):
        raise FileNotFoundError(f"{file} does not exist")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from None
    except OSError as error:
        raise OSError(f"{file} cannot be read: {error}") from None


def find(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], rename: Rename | None) -> dict[str, Entry]:
    """All tensors of a file, of several, or of a folder, by what the model calls them.

    `rename`: from a file's names to the model's; a mapping leaves the names that it has not, None leaves a tensor out.
    Raises ValueError for names that occur twice and for damaged files, OSError for those that cannot be read.
    """
    entries: dict[str, Entry] = {}
    for file, only in _files(path):
        with opened(file) as content:
            names = list(content.keys())
            if only is not None and (lacking := sorted(only - set(names))):
                raise ValueError(f"{file} lacks {some(lacking)}, which the index says it has")
            for name in names:
                renamed = _renamed(name, rename)
                if renamed is None or (only is not None and name not in only):
                    continue
                if renamed in entries:
                    other = entries[renamed]
                    raise ValueError(f"{renamed} is there twice: {other.name} of {other.file} and {name} of {file}")
                view = content.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{name} in {file} has dtype {view.get_dtype()}; expected one of {', '.join(DTYPES)}"
                    )
                entries[renamed] = Entry(file, name, tuple(view.get_shape()), DTYPES[view.get_dtype()])
    return entries


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)


def _files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[tuple[str, set[str] | None]]:
    """The files, each with the names that count; None: all."""
    if not isinstance(path, str | os.PathLike):
        return [(os.path.abspath(file), None) for file in path]
    whole = Path(path).absolute()
    if not whole.is_dir():
        return _indexed(whole) if whole.suffix == ".json" else [(str(whole), None)]
    if (whole / ONE).exists():
        return [(str(whole / ONE), None)]
    if (whole / INDEX).exists():
        return _indexed(whole / INDEX)
    raise FileNotFoundError(f"{path} has neither {ONE} nor {INDEX}")


def _indexed(index: Path) -> list[tuple[str, set[str] | None]]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if os.path.basename(file) != file:
                raise ValueError(f"{file!r} is not the name of a file beside it")
            files.setdefault(str(index.parent / file), set()).add(name)
    except FileNotFoundError:
        raise FileNotFoundError(f"{index} does not exist") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged, or no index of weights: {error}") from None
    return [(file, names) for file, names in sorted(files.items())]


def some(names: Sequence[str]) -> str:
    """A few names, for an error's text."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"


# Writing


def split(tensors: Sequence[FileTensor], max_file_bytes: int) -> list[list[FileTensor]]:
    """Deal tensors out to files in their order, each as full as it may be; a tensor longer than that has one of its own."""
    files: list[list[FileTensor]] = [[]]
    room = max_file_bytes
    for tensor in tensors:
        if tensor.nbytes > room and files[-1]:
            files.append([])
            room = max_file_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    # Longer elements first: so all are aligned.
    return [sorted(file, key=lambda tensor: -tensor.dtype.itemsize) for file in files]


def header(tensors: Sequence[FileTensor]) -> bytes:
    """What stands before the bytes of these tensors in a file."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{tensor.name} has dtype {tensor.dtype}, which safetensors does not know")
        place = [at, at + tensor.nbytes]
        fields[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_text(files: Mapping[str, Sequence[FileTensor]]) -> str:
    """The index of the files, by their names."""
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def file_names(count: int) -> list[str]:
    """What so many files of a model are called."""
    return [ONE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def exported(folder: Path) -> list[Path]:
    """The weights that a folder has, the index first: without it the rest is not found."""
    there = [folder / name for name in (INDEX, ONE) if (folder / name).exists()]
    return there + sorted(path for path in folder.glob("model-*.safetensors") if _PART.fullmatch(path.name))
