"""Dataclasses as JSON files: what a benchmark has measured is kept, and read back with every value checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def write_record(path: str, record: Any, version: int) -> None:
    """A dataclass, with those in it, as a JSON object of this format's `version`. OSError."""
    Path(path).write_text(json.dumps({"format": version, **asdict(record)}, indent=1) + "\n")


def read_record(path: str, kind: type[T], version: int, *, command: str) -> T:
    """What `write_record` has written. OSError; ValueError, which names the file and the `command` that makes such, for all else."""
    try:
        data = json.loads(Path(path).read_text())
        if data.pop("format") != version:
            raise ValueError(f"expected format {version}")
        made: T = _made(kind, data, kind.__name__)
        return made
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of `{command}`: {error}") from None


def _made(kind: Any, data: Any, where: str) -> Any:
    """A value of type `kind`: a dataclass, a sequence or mapping of them, a union, or what JSON has."""
    if is_dataclass(kind) and isinstance(data, dict):
        hints = get_type_hints(kind)
        known = {item.name for item in fields(kind)}
        if unknown := data.keys() - known:
            raise ValueError(f"{where} has {min(unknown)!r}")
        return kind(**{name: _made(hints[name], value, f"{where}.{name}") for name, value in data.items()})  # type: ignore[operator]
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        chosen = next((each for each in arguments if (each is NoneType) == (data is None)), kind)
        return _made(chosen, data, where)
    if get_origin(kind) is Sequence and isinstance(data, list):
        return [_made(arguments[0], value, where) for value in data]
    if get_origin(kind) in (Mapping, dict) and isinstance(data, dict):
        return {key: _made(arguments[1], value, f"{where}[{key!r}]") for key, value in data.items()}
    if kind is Any or (isinstance(kind, type) and isinstance(data, (int, float) if kind is float else kind)):
        return data
    raise ValueError(f"{where} is {data!r:.60}")
