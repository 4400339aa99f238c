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

from ckpt.convert.sources import PieceBuffer, Source, from_array
from ckpt.storage.local import pwrite_all
from collectives.arrays.dtypes import DTYPES, DTypeError, dtype_of

if TYPE_CHECKING:
    import torch

_HEADER_BYTES, _ENTRY_BYTES = 30, 46  # fixed parts of a zip file's record and of its entry in the directory
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_DESCRIPTOR = b"PK\x07\x08"


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

    `torch.load(weights_only=True)` runs no code of the file. ValueError for values that it cannot read, and for two values with the
    same path, for example with the keys 1 and "1".
    """
    torch = _torch()
    try:
        with open(path, "rb"):  # reports a missing file by its name
            pass
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
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
    places: dict[str, str] = {}
    try:
        leaves = list(_leaves("", "", content))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply, or holds a dict or a list that contains itself") from None
    for name, place, leaf in leaves:
        if name in places:
            raise ValueError(
                f"{path}: {places[name]} and {place} are both called {name!r} in a checkpoint, where keys are texts with '/' between; "
                "expected keys that make different names"
            )
        places[name] = place
        if torch.is_tensor(leaf):
            tensors[name] = leaf
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
    line = next(iter(str(error).splitlines()), type(error).__name__).partition(" Please use ")[0]
    return "".join(character if character.isprintable() else "?" for character in line)  # names come from the file


def _leaves(name: str, place: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Each value in nested dicts and lists: its path, its place in Python's notation ("['a'][0]"), and the value."""
    if isinstance(value, Mapping) and value:
        pairs: Any = value.items()
    elif isinstance(value, list | tuple) and value:
        pairs = enumerate(value)
    else:
        if not isinstance(value, Mapping | list | tuple):
            yield name, place, value
        return
    for key, inner in pairs:
        yield from _leaves(f"{name}/{key}" if name else str(key), f"{place}[{key!r:.200}]", inner)


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
    plain = tensor.detach().resolve_conj().resolve_neg()
    if row.numpy.isbuiltin != 1:  # bf16 and float8: torch can only give them to NumPy as integers
        plain = plain.view({1: torch.uint8, 2: torch.int16}[row.itemsize])
    return from_array(plain.numpy().view(row.numpy), name, row.name, buffer)
