"""safetensors files: their names, their contents, and their writing. This module handles values only as bytes.

A file has 8 bytes with the length of the header; the header as JSON, with each tensor's dtype, shape and place; then the tensors' bytes
end to end. So all places are known before the values, and a tensor can be written and read piece by piece. A folder has Hugging Face's
names: `model.safetensors`, or several files and `model.safetensors.index.json`, which gives the file of each tensor.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open

from ckpt.reading.sources import Source, write_all
from ckpt.storage.local import in_a_line, pwrite_all
from ckpt.storage.local_path import open_given, read_given
from collectives.arrays.dtypes import dtype_of
from collectives.texts import shown

METADATA = "__metadata__"
"""In a header, this name is not that of a tensor."""

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
"""Our names of dtypes by the names in the format."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_INDEX_BYTES = 64 << 20
_MAX_NAME_BYTES = 255  # of a file
_MAX_FILES = 1 << 14
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MAX_HEADER_VALUES = 1 << 20  # for 95,000 tensors in a file
_MAX_VALUES = 1 << 21  # of an index, for a million tensors


class FileTensor(NamedTuple):
    """A tensor that will be written; a `Source` has the same fields."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


T = TypeVar("T", FileTensor, Source)


class StoredTensor(NamedTuple):
    """A tensor in a file: `dtype`, its name in the format; `position`, that of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    position: int


# Reading


def opened(file: str, framework: str) -> safe_open:
    """Open a file with the safetensors library, which checks the header. FileNotFoundError, OSError, or ValueError if it is damaged."""
    if os.path.isdir(file):
        raise ValueError(f"{file} is a folder; expected a safetensors file")
    if not os.path.exists(file):
        raise FileNotFoundError(f"{file} does not exist")
    _check_header(file)
    try:
        return safe_open(file, framework=framework)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged, or no safetensors file: {in_a_line(error)}") from None
    except OSError as error:
        raise OSError(f"{file} cannot be read: {in_a_line(error)}") from None


def _check_header(file: str) -> None:
    """ValueError for what the library would wait for, or spend very much memory on."""
    with open(open_given(file), "rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if length <= _MAX_HEADER_BYTES and (problem := _values_error(content.read(length), _MAX_HEADER_VALUES)):
            raise ValueError(f"{file} is damaged: its header has {problem}")


def _values_error(text: bytes, most: int) -> str | None:
    """What is wrong with the number of values in a JSON text, or None. Each needs up to 100 bytes of memory."""
    num = sum(map(text.count, (b"[", b"{", b",", b":")))
    return f"{num} values; expected at most {most}" if num > most else None


def places(file: str) -> dict[str, StoredTensor]:
    """The tensors of a file by their names. Raises the errors of `opened`, and ValueError for a name that occurs twice."""
    with opened(file, "numpy"), open(open_given(file), "rb") as content:  # the library has checked the header
        length = int.from_bytes(content.read(8), "little")
        try:
            fields = _parsed(content.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}") from None
    fields.pop(METADATA, None)
    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in fields.items()
    }


def files_of(path: str | os.PathLike[str]) -> list[tuple[str, set[str] | None]]:
    """The files of a file, an index or a folder, each with the names of its tensors that are used; None: all.

    FileNotFoundError; ValueError for an index that is damaged or points elsewhere.
    """
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
        content = _parsed(read_given(index, _MAX_INDEX_BYTES))
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError("it has no weight_map, an object that gives the file of each tensor")
        files: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _is_beside(file):
                raise ValueError(f"{file!r:.200} is not the name of a file beside it")
            files.setdefault(file, set()).add(name)
            if len(files) > _MAX_FILES:
                raise ValueError(f"it names more than {_MAX_FILES} files")
    except FileNotFoundError:
        raise FileNotFoundError(f"{index} does not exist") from None
    except ValueError as error:
        raise ValueError(f"{index} is damaged, or no index of weights: {error}") from None
    _check_distinct([index.parent / file for file in files])
    return [(str(index.parent / file), names) for file, names in sorted(files.items())]


def _check_distinct(files: Iterable[Path]) -> None:
    """ValueError if two names lead to one file, which could stand for any number of files. Missing files are left to who opens them."""
    seen: dict[tuple[int, int], Path] = {}
    for file in files:
        with suppress(OSError):
            its = os.stat(file)
            if (other := seen.setdefault((its.st_dev, its.st_ino), file)) != file:
                raise ValueError(
                    f"{file} is the same file as {other}; expected tensors of one file under one name in the index"
                )


def _is_beside(file: str) -> bool:
    is_name = os.path.basename(file) == file and file not in ("", ".", "..") and file.isprintable()
    return is_name and len(file.encode()) <= _MAX_NAME_BYTES


def _parsed(text: bytes) -> Any:
    """The parsed JSON `text`. ValueError if a key occurs twice, because some programs would take the first value, others the last.

    Also for text that would need far more memory than it has bytes, or is nested too deeply.
    """

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"the name {twice!r:.200} comes twice; expected names that are different")
        return found

    if problem := _values_error(text, _MAX_VALUES):
        raise ValueError(f"it has {problem}")
    try:
        return json.loads(text, object_pairs_hook=distinct)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_index(file: str, only: set[str] | None, names: Sequence[str]) -> None:
    """ValueError unless a file, which has `names`, has all names that the index gives for it, `only`."""
    if only is not None and (lacking := sorted(only - set(names))):
        raise ValueError(f"{file} lacks {some(lacking)}, which the index says it has")


def some(names: Sequence[str]) -> str:
    """A few names, for an error's text."""
    first = [shown(name[:200]) for name in names[:3]]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"


# Writing


def write(path: Path, sources: Sequence[Source]) -> None:
    """Make a file. OSError that names it."""
    in_order = _aligned(sources)
    start = header(in_order)
    with open(path, "wb", buffering=0) as file:
        pwrite_all(file.fileno(), memoryview(start), 0)
        at = len(start)
        for source in in_order:
            write_all(file.fileno(), source, at)
            at += source.nbytes


def split(tensors: Sequence[T], max_file_bytes: int) -> list[list[T]]:
    """Distribute tensors over files in their order, each as full as possible; a tensor longer than the limit gets its own file."""
    files: list[list[T]] = [[]]
    room = max_file_bytes
    for tensor in tensors:
        if tensor.nbytes > room and files[-1]:
            files.append([])
            room = max_file_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    return [_aligned(file) for file in files]


def _aligned(tensors: Sequence[T]) -> list[T]:
    """The tensors sorted so that longer elements come first, which aligns all tensors."""
    return sorted(tensors, key=lambda tensor: -dtype_of(tensor.dtype).itemsize)


def header(tensors: Sequence[FileTensor | Source]) -> bytes:
    """The bytes of a file before its tensors. ValueError for a dtype or a name that the format does not have."""
    fields: dict[str, object] = {METADATA: {"format": "pt"}}
    at = 0
    for tensor in tensors:
        if tensor.name == METADATA:
            raise ValueError(
                f"a tensor is called {METADATA}, which is no tensor's name in safetensors; rename it, or leave it out"
            )
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{tensor.name} has dtype {tensor.dtype}, which safetensors does not know")
        place = [at, at + tensor.nbytes]
        fields[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_text(files: Mapping[str, Sequence[FileTensor | Source]]) -> str:
    """The index of the files, by their names."""
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def file_names(count: int, one: str = ONE) -> list[str]:
    """The names of the `count` files of a model; `one`: the name of a single file."""
    stem = one.removesuffix(".safetensors")
    return [one] if count == 1 else [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def index_name(one: str = ONE) -> str:
    """The name of the index of files."""
    return f"{one}.index.json"


def exported(folder: Path, one: str = ONE) -> list[Path]:
    """The files of a model in a folder. The index comes first, so that a removal in this order hides the other files at once."""
    part = re.compile(re.escape(one.removesuffix(".safetensors")) + r"-\d{5}-of-\d{5}\.safetensors")
    there = [folder / name for name in (index_name(one), one) if (folder / name).exists()]
    names = os.listdir(folder) if folder.is_dir() else []
    return there + [folder / name for name in sorted(names) if part.fullmatch(name)]
