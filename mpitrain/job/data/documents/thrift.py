"""Structs in Thrift's compact protocol, in which the footer and the page headers of Parquet files are.

pyarrow ends the whole process if it is asked for some footers of damaged files. Here no byte is believed before it is looked at, and
what pyarrow would read as another value is an error. Most of a footer is passed over, so this is the part that is written for speed.

Source of the format: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_MOST_DEPTH = 16
TRUE, FALSE, _BYTE, _I16, I32, I64, _DOUBLE, BINARY, LIST, _SET, _MAP, STRUCT = range(1, 13)


class Wanted(NamedTuple):
    """What is read of a struct."""

    fields: Mapping[int, Any]
    """By their numbers: I32, I64 or BINARY, or a Wanted for one or more structs."""
    usual: Callable[[Any, int], tuple[dict[int, Any], int] | None] = lambda data, at: None
    """A faster way for structs of the form in which most writers write them: as `read_struct`, or None for another form."""


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
            number, at = read_number(data, at)
        if number not in wanted.fields:
            if not 0 <= number < 1 << 15:  # pyarrow would take the lower bits
                raise ThriftError(f"the field before byte {at} has the number {number}")
            at = _after(data, at, kind, depth)
            continue
        value, at = _value(data, at, kind, wanted.fields[number], depth)
        if value is not None and fields.setdefault(number, value) is not value:
            raise ThriftError(f"the field before byte {at} is there twice")
    return fields, at + 1


def _value(data: Any, at: int, kind: int, wanted: Any, depth: int) -> tuple[Any, int]:
    """A wanted value, None if it is of another kind, and the place after it."""
    if isinstance(wanted, Wanted) and kind == STRUCT:
        return _struct(data, at, wanted, depth - 1)
    if isinstance(wanted, Wanted) and kind == LIST and data[at] & 15 == STRUCT:
        num, _, at = _list(data, at)
        structs = []
        for _ in range(num):
            struct, at = wanted.usual(data, at) or _struct(data, at, wanted, depth - 1)
            structs.append(struct)
        return structs, at
    if kind != wanted:
        return None, _after(data, at, kind, depth)
    if kind == BINARY:
        length, at = _unsigned(data, at)
        return bytes(data[at : at + length]), at + length
    value, after = read_number(data, at)
    if kind == I32 and not -1 << 31 <= value < 1 << 31:  # pyarrow would take the lower bits
        raise ThriftError(f"the number at byte {at} is {value}")
    return value, after


def _after(data: Any, at: int, kind: int, depth: int) -> int:
    """The place after a value that is not wanted."""
    if kind == BINARY:
        length, at = _unsigned(data, at)
        return at + length
    if _I16 <= kind <= I64:
        return at + 1 if data[at] < 0x80 else _unsigned(data, at)[1]
    if kind == STRUCT:
        return _after_struct(data, at, depth - 1)
    if kind in (LIST, _SET):
        num, inner, at = _list(data, at)
        if inner in (TRUE, FALSE):
            return at + num
        _check_depth(at, depth)
        for _ in range(num):
            at = at + 1 if inner == I32 and data[at] < 0x80 else _after(data, at, inner, depth - 1)
        return at
    if kind in (TRUE, FALSE):
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
        if kind == BINARY and data[at] < 0x80:
            at += 1 + data[at]
        elif _I16 <= kind <= I64 and data[at] < 0x80:
            at += 1
        elif kind > FALSE:
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
        if byte < 0x80 and value < 1 << 64:
            return value, at + 1
    raise ThriftError(f"the number before byte {at + 1} is too long")


def read_number(data: Any, at: int) -> tuple[int, int]:
    """The number of up to 64 bits at byte `at`, and the place after it. IndexError where the bytes end."""
    value, at = _unsigned(data, at)
    return value >> 1 ^ -(value & 1), at
