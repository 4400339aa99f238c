"""torch's own files: `.pt`, a dict of name -> tensor. torch is imported when a file is written or read.

A `.pt` is a zip file with the uncompressed bytes of each tensor in a record. torch writes the file without these bytes (`skip_data`),
then this module writes them to their places. To read, the file is mapped, so that only requested parts are read.
"""

import os
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile, ZipInfo

import numpy as np

from ckpt.convert.formats import torch_archive
from ckpt.format.manifest import shape_error
from ckpt.reading.sources import PieceBuffer, Source, from_array
from ckpt.storage.local import in_a_line, pwrite_all
from ckpt.storage.local_path import open_given
from collectives.arrays.dtypes import DTYPES, DTypeError, dtype_of

if TYPE_CHECKING:
    import torch

_HEADER_BYTES, _ENTRY_BYTES = 30, 46  # fixed parts of a zip file's record and of its entry in the directory
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_DESCRIPTOR = b"PK\x07\x08"
_MAX_TENSORS = 1 << 16
_MAX_VALUES, _MAX_CHARACTERS, _MAX_DEPTH = 1 << 20, 64 << 20, 900


def write(path: Path, sources: Sequence[Source]) -> None:
    """Make a file that `torch.load` reads as a dict of plain tensors. OSError that names it."""
    torch = _torch()
    from torch._subclasses.fake_tensor import FakeTensorMode  # tensors without memory

    if unknown := next((source for source in sources if not hasattr(torch, source.dtype)), None):
        raise ValueError(f"{unknown.name} has dtype {unknown.dtype}, which torch does not know")
    with FakeTensorMode():
        empty = {source.name: torch.empty(source.shape, dtype=getattr(torch, source.dtype)) for source in sources}
    path.unlink(missing_ok=True)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(empty, path)
    with ZipFile(path) as skeleton:
        records, directory = skeleton.infolist(), skeleton.start_dir
    by_name = {f"data/{number}": source for number, source in enumerate(sources)}  # torch numbers them in this order
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for record in records:
            entry = os.pread(fd, _ENTRY_BYTES, directory)
            if source := by_name.pop(record.filename.partition("/")[2], None):
                assert record.file_size == source.nbytes
                os.pwrite(fd, _fill(fd, record, source).to_bytes(4, "little"), directory + 16)
            directory += _ENTRY_BYTES + sum(int.from_bytes(entry[at : at + 2], "little") for at in (28, 30, 32))
        assert not by_name
    finally:
        os.close(fd)


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"files of torch ({', '.join(SUFFIXES)}) need torch, which is not installed: pip install torch"
        ) from None
    return torch


def _fill(fd: int, record: ZipInfo, source: Source) -> int:
    """Write a record's bytes; returns their CRC-32, which the file has after them and in the directory at its end."""
    header = os.pread(fd, _HEADER_BYTES, record.header_offset)
    position = record.header_offset + _HEADER_BYTES
    position += sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    crc = 0
    for piece in source.pieces():
        crc = zlib.crc32(piece, crc)
        pwrite_all(fd, piece, position)
        position += len(piece)
    if os.pread(fd, 4, position) == _DESCRIPTOR:
        os.pwrite(fd, crc.to_bytes(4, "little"), position + 4)
    return crc


def read(path: Path) -> tuple[dict[str, "torch.Tensor"], dict[str, Any]]:
    """The mapped tensors of a file, and its JSON-like values, each by its path: the keys that lead to it, joined with "/".

    `torch.load(weights_only=True)` runs no code of the file, and torch_archive.py bounds what else it does. ValueError for values that
    it cannot read, for two values with the same path, for example with the keys 1 and "1", and on an older torch.
    """
    torch = _torch()
    with open(open_given(path), "rb") as file:
        if problem := torch_archive.version_error(torch.__version__):
            raise ValueError(f"{path} is not read: {problem}")
        try:
            torch_archive.check(file)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged pickle leads torch to any of them
            raise ValueError(
                f"{path} cannot be read by torch.load(weights_only=True, mmap=True): {_reason(error)} (expected a dict of tensors in "
                "the zip format that torch.save has written since torch 1.6; objects of classes are refused, since they could run code)"
            ) from None
    if torch.is_tensor(content):
        raise ValueError(
            f"{path} holds a bare tensor, which has no name; expected a dict of tensors: torch.save({{'name': tensor}}, file)"
        )
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    places: dict[str, _Place] = {}
    for name, place, leaf in _leaves(content, path):
        if name in places:
            raise ValueError(
                f"{path}: {_shown(places[name])} and {_shown(place)} are both called {name!r} in a checkpoint, where keys are texts "
                "with '/' between; expected keys that make different names"
            )
        places[name] = place
        if torch.is_tensor(leaf):
            tensors[name] = leaf
            if len(tensors) > _MAX_TENSORS:
                raise ValueError(f"{path} holds more than {_MAX_TENSORS} tensors, which may all be one")
        elif leaf is None or isinstance(leaf, str | int | float):
            others[name] = leaf
        else:
            raise ValueError(
                f"{path}: {name!r} is a {type(leaf).__name__}; expected a tensor, a number, a text or None"
            )
    return tensors, others


def _reason(error: BaseException) -> str:
    """torch's message about the file, without its advice to run the code in the file."""
    if isinstance(error, pickle.UnpicklingError) and isinstance(error.__context__, pickle.UnpicklingError):
        error = error.__context__  # the reason, which torch wraps in the advice
    return in_a_line(error).partition(" Please use ")[0]


_Place = tuple[Any, ...]
"""A key, and the place of the dict or list that has it; () for the whole content."""


def _leaves(content: Any, path: Path) -> Iterator[tuple[str, _Place, Any]]:
    """Each value in nested dicts and lists, with its path and its place.

    A list may be in many lists, so a few bytes may stand for any number of values: ValueError for more than a checkpoint could hold.
    """
    num = num_characters = 0
    stack: list[tuple[str, _Place, int, Iterator[tuple[Any, Any]]]] = [("", (), 0, iter([("", content)]))]
    while stack:
        before, above, depth, pairs = stack[-1]
        if (pair := next(pairs, None)) is None:
            stack.pop()
            continue
        key, value = pair
        if not (key is None or isinstance(key, str | int | float | tuple)):
            raise ValueError(f"{path}: a key is a {type(key).__name__}; expected texts and numbers")
        name = f"{before}/{key}" if before else str(key)
        place = (key, above) if depth else ()
        num, num_characters = num + 1, num_characters + len(name) + (len(value) if isinstance(value, str) else 0)
        if num > _MAX_VALUES or num_characters > _MAX_CHARACTERS:
            raise ValueError(
                f"{path} holds more values or longer texts than a checkpoint can: those of a list in several lists count in each"
            )
        if depth > _MAX_DEPTH:
            raise ValueError(f"{path} is nested too deeply, or holds a dict or a list that contains itself")
        if isinstance(value, Mapping):
            stack.append((name, place, depth + 1, iter(value.items())))
        elif isinstance(value, list | tuple):
            stack.append((name, place, depth + 1, iter(enumerate(value))))
        else:
            yield name, place, value


def _shown(place: _Place) -> str:
    """A place in Python's notation: "['a'][0]"."""
    keys = []
    while place:
        key, place = place
        keys.append(f"[{key!r:.200}]")
    return "".join(reversed(keys))


def source_of(tensor: "torch.Tensor", name: str, buffer: PieceBuffer) -> Source:
    """A source for a tensor in host memory, with any strides. ValueError if it is not dense or has no plain numbers."""
    torch = _torch()
    try:
        row = dtype_of(tensor.dtype)
    except DTypeError:
        raise ValueError(
            f"{name!r} has dtype {tensor.dtype}; expected one of {', '.join(DTYPES)} (only= leaves it out)"
        ) from None
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ValueError(f"{name!r} is a {tensor.layout} tensor on {tensor.device}; expected a dense one")
    _check_extent(tensor, name)
    # torch would conjugate and negate the whole of it in memory.
    plain, is_conj, is_neg = tensor.detach(), tensor.is_conj(), tensor.is_neg()
    plain = plain.conj() if is_conj else plain
    plain = torch._neg_view(plain) if is_neg else plain

    def change(piece: np.ndarray) -> np.ndarray:
        piece = piece.conj() if is_conj else piece
        return np.negative(piece) if is_neg else piece

    if row.numpy.isbuiltin != 1:  # bf16 and float8: torch can only give them to NumPy as integers
        plain = plain.view({1: torch.uint8, 2: torch.int16}[row.itemsize])
    return from_array(plain.numpy().view(row.numpy), name, row.name, buffer, change)


def _check_extent(tensor: "torch.Tensor", name: str) -> None:
    """ValueError unless the tensor lies inside its storage, and an array can have its shape. torch takes negative sizes from a file."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if any(number < 0 for number in (*shape, *strides)):
        raise ValueError(f"{name!r} has the shape {shape} and the strides {strides}, which no array can have")
    if problem := shape_error(shape, tensor.element_size()):
        raise ValueError(f"{name!r}: {problem}")
    end = tensor.storage_offset() + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and end * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name!r} has elements up to number {end}, which its file does not have")
