"""What a checkpoint's meta tells of the documents, with types: a checkpoint of a stranger may have anything there."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ckpt.format.validation import converted

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Number = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


class _Source(msgspec.Struct):
    name: str
    folder: str
    field: str | None
    chunk_bytes: _Number
    eras: Annotated[list[tuple[_Count, _Number]], msgspec.Meta(min_length=1, max_length=1 << 16)]


class _Documents(msgspec.Struct):
    lanes: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    order: dict[str, Any]
    sources: list[_Source]
    list_bytes: dict[str, _Count]


def check(meta: Mapping[str, Any]) -> None:
    """ValueError unless `meta` is as `DocumentBatches.described` makes it."""
    try:
        converted(dict(meta), _Documents)
    except ValueError as error:
        raise ValueError(f"data: the checkpoint's meta has what no run writes: {error}") from None
