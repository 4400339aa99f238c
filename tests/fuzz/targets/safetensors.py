"""safetensors for `ckpt import`: a file, or a folder with two files and their index. Headers say anything, and their lengths fit."""

import json
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.target import Files, Parts, Target

import ckpt
from ckpt.convert.formats.safetensors import INDEX, ONE

_SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I64": 8, "BOOL": 1, "C64": 8}
_FILES = ("model-00001-of-00002", "model-00002-of-00002")


def _header(rng: Random, names: list[str]) -> tuple[dict[str, Any], int]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    at = 0
    for name in names:
        dtype, shape = rng.choice(list(_SIZES)), [rng.randrange(4) for _ in range(rng.randrange(4))]
        nbytes = prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    return header, at


def _placed(header: Any) -> int:
    """Let the offsets of a header fit its shapes, as far as they are shapes. Returns the bytes of the data."""
    at = 0
    for entry in header.values() if isinstance(header, dict) else ():
        try:
            nbytes = prod(entry["shape"]) * _SIZES[entry["dtype"]]
            if type(nbytes) is not int or not 0 <= nbytes < 1 << 16:
                continue
            entry["data_offsets"] = [at, at + nbytes]
            at += nbytes
        except (TypeError, KeyError, AttributeError, OverflowError):
            continue
    return at


class SafeTensors(Target):
    def make(self, rng: Random) -> Parts:
        names = [f"blocks.{i}.w" for i in range(rng.randrange(1, 5))]
        if rng.random() < 0.6:
            header, nbytes = _header(rng, names)
            return {"model header": header, "model data": bytes(nbytes)}
        parts: Parts = {INDEX: {"metadata": {"total_size": 1}, "weight_map": {}}}
        for number, stem in enumerate(_FILES):
            header, nbytes = _header(rng, names[number::2] or ["z"])
            parts |= {f"{stem} header": header, f"{stem} data": bytes(nbytes)}
            found = {name: f"{stem}.safetensors" for name in header if name != "__metadata__"}
            parts[INDEX]["weight_map"] |= found
        return parts

    def wrap(self, rng: Random, parts: Parts) -> Files:
        files: Files = {}
        fits = rng.random() < 0.6
        for name, part in parts.items():
            stem, _, kind = name.partition(" ")
            if kind == "header":
                data = parts[f"{stem} data"]
                data = bytes(_placed(part)) if fits else data
                text = json.dumps(part).encode()
                files[f"{stem}.safetensors"] = len(text).to_bytes(8, "little") + text + data
            elif kind != "data":
                files[name] = json.dumps(part).encode()
        return files

    def passes(self, files: Files) -> bool:
        return all(_is_framed(name, content) for name, content in files.items() if isinstance(content, bytes))

    def read(self, folder: Path) -> None:
        source = folder / ONE if (folder / ONE).exists() and len(list(folder.iterdir())) == 1 else folder
        path = ckpt.import_file(source, folder.with_name("output") / "c")
        assert ckpt.verify(path, threads=1) == []


def _is_framed(name: str, content: bytes) -> bool:
    """Whether the length before the header leads to its end, and all of it is JSON."""
    if name != INDEX:
        length = int.from_bytes(content[:8], "little")
        if len(content) < 8 + length:
            return False
        content = content[8 : 8 + length]
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


TARGET = SafeTensors()
