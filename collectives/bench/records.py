"""Dataclasses as JSON files: what a benchmark has measured is kept, and read back with every value checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

R = TypeVar("R", bound="Record")


class Record:
    """A base of dataclasses that are kept in files. `FORMAT`: the version of the file; `COMMAND`: what makes such files."""

    FORMAT: ClassVar[int]
    COMMAND: ClassVar[str]

    def write(self, path: str) -> None:
        """As a JSON object. OSError."""
        Path(path).write_text(json.dumps({"format": self.FORMAT, **asdict(self)}, indent=1) + "\n")  # type: ignore[call-overload]

    @classmethod
    def read(cls, path: str) -> Self:
        """What `write` has written. OSError; ValueError, which names the file and the command, for anything else."""
        try:
            data = json.loads(Path(path).read_text())
            if data.pop("format") != cls.FORMAT:
                raise ValueError(f"expected format {cls.FORMAT}")
            made: Self = _made(cls, data, cls.__name__)
            return made
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of `{cls.COMMAND}`: {error}") from None


def alike(records: Sequence[R], *names: str) -> list[list[R]]:
    """The records put together whose fields of these names are equal, in the order in which they came."""
    found: dict[str, list[R]] = {}
    for record in records:
        kind = json.dumps([getattr(record, name) for name in names], sort_keys=True)
        found.setdefault(kind, []).append(record)
    return list(found.values())


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
