"""Checkpoints as somebody makes them who means harm: with checksums that fit."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from ckpt.format.manifest import FILE_NAME, File, file_entry
from ckpt.format.validation import file_of
from ckpt.saving.writer import rest_checksum


def forged(data: bytes, edit: Callable) -> bytes:
    """The manifest `data` after its lines went through `edit(header, meta, tensors)`."""
    header, meta, *tensors = [json.loads(line) for line in data.splitlines()[:-1]]
    edit(header, meta, tensors)
    return signed([json.dumps(line).encode() for line in (header, meta, *tensors)])


def signed(lines: Sequence[bytes]) -> bytes:
    """A manifest of these lines."""
    body = b"".join(line + b"\n" for line in lines)
    return body + f'{{"xxh3":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode()


def forge(checkpoint: Path, edit: Callable) -> None:
    """`forged`, on the disk."""
    manifest = checkpoint / FILE_NAME
    manifest.write_bytes(forged(manifest.read_bytes(), edit))


def fit(checkpoint: Path, name: str) -> None:
    """Let the manifest say what the altered file `name` has now."""
    path = checkpoint / name

    def edit(header, meta, tensors):
        entry = next(entry for entry in header["files"] if entry["name"] == name)
        datasets = file_of({**entry, "bytes": 1 << 60}).datasets
        with open(path, "rb") as file:
            nbytes = path.stat().st_size
            entry |= file_entry(File(name, nbytes, datasets, rest_checksum(file.fileno(), nbytes, datasets)))

    forge(checkpoint, edit)
