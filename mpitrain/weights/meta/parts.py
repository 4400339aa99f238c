"""What mpitrain has in the meta of a checkpoint, with types: a checkpoint of a stranger may have anything there."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

import ckpt
from ckpt.format.validation import converted

SAVED_ONLY = "saved_only"
"""The key of the patterns in the meta of a checkpoint of a part of a model."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Optimizer(msgspec.Struct):
    groups: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    kind: str | None = None
    names: list[list[str]] | msgspec.UnsetType = msgspec.UNSET
    cut: dict[str, list[str]] = {}
    others: list[tuple[Any, Any]] = []

    def __post_init__(self) -> None:
        if isinstance(self.names, list) and len(self.names) != len(self.groups):
            raise ValueError(f"{len(self.groups)} groups, and the names of {len(self.names)}")


class _Compression(msgspec.Struct):
    reductions: _Count
    scale: float
    has_residuals: bool


class _DiLoCo(msgspec.Struct):
    steps: _Count = 0
    copies: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] = 1
    is_apart: bool = False


_TYPES: dict[str, Any] = {
    "optimizer": _Optimizer,
    "extra_state": dict[str, Any],
    "compression": _Compression,
    "diloco": _DiLoCo,
    "saved_only": list[str],
}


def part_of_meta(meta: Mapping[str, Any], name: str, path: str) -> Any:
    """What the meta of the checkpoint `path` has under `name`, or None. ckpt.CheckpointError if no save of mpitrain writes it so."""
    if name not in meta:
        return None
    try:
        converted(meta[name], _TYPES[name])
    except ValueError as error:
        raise ckpt.CheckpointError(f"{path}: its meta has under {name!r} what no save writes: {error}") from None
    return meta[name]
