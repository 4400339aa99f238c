"""safetensors for `ckpt import`: a file, or a folder with two files and their index. Headers say anything, and their lengths fit."""

import json
from collections.abc import Callable
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


_ODD_DTYPES = ["f32", "F64", "I8", "F8_E8M0", "F4", "F6_E2M3", "I128", "BOOL ", "", "F32" * 1000, 7, None, ["F32"]]


def _told_wrongly(rng: Random, header: dict[str, Any]) -> None:
    """Let the offsets, the dtype or the shape of one tensor say something else, often of another one."""
    entries = [entry for name, entry in header.items() if name != "__metadata__" and isinstance(entry, dict)]
    if not entries:
        return
    its, other = rng.choice(entries), rng.choice(entries)
    begin, end = ends if isinstance(ends := its.get("data_offsets"), list) and len(ends) == 2 else (0, 0)
    kind = rng.randrange(8)
    if kind == 0:
        its["dtype"] = rng.choice(_ODD_DTYPES)
    elif kind == 1:
        its["shape"] = rng.choice(
            [other.get("shape"), [-1, -4], [1 << 32] * 2, [0, 1 << 63], [1] * 1000, [2.0], [True]]
        )
    elif kind == 2:
        its["data_offsets"] = other.get("data_offsets")
    elif type(begin) is int and type(end) is int:
        moved = [(begin + 1, end + 1), (begin, end + 4), (end, begin), (begin - 4, end - 4), (begin, begin)]
        its["data_offsets"] = list(moved[kind - 3])


def _escaped(name: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in name)


_EMPTY = '{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
_MORE: dict[str, Callable[[str, str, int], str]] = {
    "a name twice": lambda name, value, times: f"{json.dumps(name)}: {value}",
    "a name twice with other values": lambda name, value, times: f"{json.dumps(name)}: {_EMPTY}",
    "a name twice, once escaped": lambda name, value, times: f'"{_escaped(name)}": {value}',
    "deep lists": lambda name, value, times: '"__metadata__": ' + "[" * times + "]" * times,
    "deep objects": lambda name, value, times: '"x": ' + '{"a":' * times + "1" + "}" * times,
    "many": lambda name, value, times: ", ".join(f'"{number}": {_EMPTY}' for number in range(times // 10)),
    "long metadata": lambda name, value, times: '"__metadata__": {"a": "' + "x" * (100 * times) + '"}',
    "spaces": lambda name, value, times: '"__metadata__": {}' + " " * (100 * times),
}
"""What is added to a header as text, from the name and value of a tensor and a number."""


def _text(part: Any, change: dict[str, Any] | None) -> bytes:
    """A header as JSON, with more at its beginning or end."""
    text = json.dumps(part)
    if change is None or not isinstance(part, dict) or not part:
        return text.encode()
    name = list(part)[change["number"] % len(part)]
    more = _MORE[change["kind"]](name, json.dumps(part[name]), change["times"])
    return (f"{{{more}, {text[1:]}" if change["first"] else f"{text[:-1]}, {more}}}").encode()


_CHANGE = "a change of the text"
"""A part that is no file: what happens to the JSON of the headers when it is text."""


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

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        headers = [name for name, part in parts.items() if name.endswith(" header") and isinstance(part, dict)]
        if headers and rng.random() < 0.3:
            _told_wrongly(rng, parts[rng.choice(headers)])
            return parts
        if rng.random() < 0.3:
            times = rng.choice([1, 200, 2000, 20_000])
            change = {
                "kind": rng.choice(list(_MORE)),
                "number": rng.randrange(10),
                "times": times,
                "first": rng.random() < 0.5,
            }
            return {**parts, _CHANGE: change}
        chosen = {name: part for name, part in parts.items() if name != _CHANGE}
        return {**parts, **super().mutate(rng, chosen)}

    def wrap(self, rng: Random, parts: Parts) -> Files:
        files: Files = {}
        fits = rng.random() < 0.4
        for name, part in parts.items():
            stem, _, kind = name.partition(" ")
            if kind == "header":
                data = parts[f"{stem} data"]
                data = bytes(_placed(part)) if fits else data
                text = _text(part, parts.get(_CHANGE))
                files[f"{stem}.safetensors"] = len(text).to_bytes(8, "little") + text + data
            elif kind != "data" and name != _CHANGE:
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
