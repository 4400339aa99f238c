"""Files of tokens in HDF5. The usual versions of the format have no checksums: whatever is mutated, HDF5 takes it as it is."""

import io
import os
from functools import cache
from pathlib import Path
from random import Random

import h5py
import numpy as np
from fuzzing.mutation import mutate_bytes
from fuzzing.target import Files, Parts, Sound, Target

import ckpt

_MAGIC = b"\x89HDF\r\n\x1a\n"
_VALUES = np.arange(100, dtype=np.uint16)
_NAMES = (None, "tokens", "a/b", "a/link")
_files = ckpt.VectorFiles()


@cache
def made(kind: str) -> bytes:
    """A file of one of several kinds."""
    image = io.BytesIO()
    with h5py.File(
        image, "w", libver="latest" if kind == "new" else "earliest", userblock_size=512 * (kind == "room")
    ) as file:
        file["tokens"] = _VALUES
        file["a/b"] = _VALUES.astype(">i4")
        file["a/link"] = h5py.SoftLink("/tokens")
        file["elsewhere"] = h5py.ExternalLink("/dev/zero", "tokens")
        file["tokens"].attrs["from"] = "a tokenizer"
        file.create_dataset("chunked", data=_VALUES, chunks=(10,), compression="gzip")
        for number in range(20 * (kind == "many")):
            file[f"other/{number}"] = np.zeros((2, 2))
    return image.getvalue()


class Hdf5(Target):
    limit_s = 40.0  # HDF5 itself has 10 s of a processor for a file

    share_sound = 0.1

    def sound(self, rng: Random) -> Sound:
        data = made(rng.choice(["old", "old", "room", "many", "new"]))
        return Sound({"a.h5": data}, {name: _VALUES.tolist() for name in _NAMES})

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        data = parts["a.h5"]
        if rng.random() < 0.2:
            return {"a.h5": mutate_bytes(rng, data)}
        # Without a change of the length, the parts of the file stay where their addresses say.
        told = [at for at, byte in enumerate(data) if byte and at >= 8]  # most of a file is room
        at, width = rng.choice(told or [8]), rng.choice([1, 2, 4, 8])
        value = mutate_bytes(rng, data[at : at + width]).ljust(width, b"\0")[:width]
        return {"a.h5": data[:at] + value + data[at + width :]}

    def passes(self, files: Files) -> bool:
        data = files["a.h5"]
        assert isinstance(data, bytes)
        at = next((at for at in (0, 512, 1024) if data[at : at + 8] == _MAGIC), None)
        return data == made("new") or (at is not None and data[at + 8 : at + 9] < b"\2")

    def read(self, folder: Path) -> object:
        refused, found = [], {}
        for name in _NAMES:
            try:
                tokens = _files.map(folder / "a.h5", name)
            except ValueError as error:
                refused.append(error)
                continue
            assert tokens.ndim == 1 and tokens.dtype.kind in "iu" and tokens.nbytes <= os.stat(folder / "a.h5").st_size
            found[name] = tokens.tolist()
        if len(refused) == len(_NAMES):
            raise refused[0]
        return found


TARGET = Hdf5()
