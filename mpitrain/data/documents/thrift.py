"""Structs in Thrift's compact protocol, in which the footer and the page headers of Parquet files are.

pyarrow ends the whole process if it is asked for some footers of damaged files. Here no byte is believed before it is looked at. Most
of a footer is passed over, so this is the part that is written for speed.
"""

from collections.abc import Mapping
from typing import Any

_MOST_DEPTH = 16
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)

Wanted = Mapping[int, Any]
"""The fields of a struct that are read, by their numbers: None for a number or a text, the wanted fields for one or more structs."""


class ThriftError(ValueError):
    """The bytes are no struct."""


def read_struct(data: Any, at: int, end: int, wanted: Wanted) -> tuple[dict[int, Any], int]:
    """The wanted fields of the struct that begins at byte `at`, as far as it has them, and the place after it.

    A field that is of another kind than is wanted is left out. ThriftError if there is no struct before byte `end`.
    """
    try:
        fields, after = _struct(data, at, wanted, _MOST_DEPTH)
    except IndexError:
        raise ThriftError(f"the struct at byte {at} is cut off") from None
    if after > end:
        raise ThriftError(f"the struct at byte {at} ends at byte {after}, and not before byte {end}")
    return fields, after


def _struct(data: Any, at: int, wanted: Wanted, depth: int) -> tuple[dict[int, Any], int]:
    """IndexError where the bytes end."""
    _check_depth(at, depth)
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head > 15:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        if number not in wanted:
            at = _after(data, at, kind, depth)
            continue
        value: Any = None
        inner = wanted[number]
        if inner is None and _I16 <= kind <= _I64:
            value, at = _signed(data, at)
        elif inner is None and kind == _BINARY:
            length, at = _unsigned(data, at)
            value, at = bytes(data[at : at + length]), at + length
        elif inner is not None and kind == _STRUCT:
            value, at = _struct(data, at, inner, depth - 1)
        elif inner is not None and kind == _LIST and data[at] & 15 == _STRUCT:
            num, _, at = _list(data, at)
            value = []
            for _ in range(num):
                item, at = _struct(data, at, inner, depth - 1)
                value.append(item)
        else:
            at = _after(data, at, kind, depth)
        if value is not None:
            fields[number] = value
    return fields, at + 1


def _after(data: Any, at: int, kind: int, depth: int) -> int:
    """The place after a value that is not wanted."""
    if kind == _BINARY:
        length, at = _unsigned(data, at)
        return at + length
    if _I16 <= kind <= _I64:
        return at + 1 if data[at] < 0x80 else _unsigned(data, at)[1]
    if kind == _STRUCT:
        return _after_struct(data, at, depth - 1)
    if kind in (_LIST, _SET):
        num, inner, at = _list(data, at)
        if inner in (_TRUE, _FALSE):
            return at + num
        _check_depth(at, depth)
        for _ in range(num):
            at = at + 1 if inner == _I32 and data[at] < 0x80 else _after(data, at, inner, depth - 1)
        return at
    if kind in (_TRUE, _FALSE):
        return at  # the kind is the value
    if kind in (_BYTE, _DOUBLE):
        return at + (8 if kind == _DOUBLE else 1)
    raise ThriftError(f"the value at byte {at} is of the kind {kind}, which Parquet does not have")


def _after_struct(data: Any, at: int, depth: int) -> int:
    """The place after a struct: `_after` with the usual kinds in place."""
    _check_depth(at, depth)
    while head := data[at]:
        at += 1
        if head < 16:
            at = _unsigned(data, at)[1]
        kind = head & 15
        if kind == _BINARY and data[at] < 0x80:
            at += 1 + data[at]
        elif _I16 <= kind <= _I64 and data[at] < 0x80:
            at += 1
        elif kind > _FALSE:
            at = _after(data, at, kind, depth)
    return at + 1


def _check_depth(at: int, depth: int) -> None:
    if depth < 0:
        raise ThriftError(f"the value at byte {at} is nested too deeply")


def _list(data: Any, at: int) -> tuple[int, int, int]:
    """The number of items of a list, their kind, and the place of the first one."""
    head = data[at]
    if head < 0xF0:
        return head >> 4, head & 15, at + 1
    num, at = _unsigned(data, at + 1)
    if num > len(data) - at:
        raise ThriftError(f"the list at byte {at} is cut off: it has {num} items")
    return num, head & 15, at


def _unsigned(data: Any, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
    raise ThriftError(f"the number before byte {at} is too long")


def _signed(data: Any, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return value >> 1 ^ -(value & 1), at
