"""Structs in Thrift's compact protocol, as in Parquet files, as values that can be mutated: a dict of fields, of [kind, value] each.

The encoding takes whatever a mutation has made of them.
"""

from typing import Any

_BOOLS, _NUMBERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), (4, 5, 6), 7, 8, (9, 10), 12


def decoded(data: bytes, at: int = 0) -> tuple[dict[str, list[Any]], int]:
    """The struct that begins at a byte, and the place after it."""
    fields: dict[str, list[Any]] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        value, at = _value(data, at, head & 15)
        fields[str(number)] = [head & 15, value]
    return fields, at + 1


def encoded(fields: Any) -> bytes:
    """A struct. Fields that are no pair of a kind and a value are left out."""
    out, last = b"", 0
    for key, pair in fields.items() if isinstance(fields, dict) else ():
        if not (isinstance(pair, list) and len(pair) == 2 and key.isdecimal() and len(key) < 6):
            continue
        number, kind = int(key), pair[0] % 16 if isinstance(pair[0], int) else 8
        step = number - last
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _of_signed(number)
        out, last = out + _of_value(kind, pair[1]), number
    return out + b"\0"


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in _BOOLS:
        return kind == 1, at
    if kind in _NUMBERS:
        return _signed(data, at)
    if kind == _BINARY:
        length, at = _unsigned(data, at)
        return data[at : at + length].hex(), at + length
    if kind in _LISTS:
        num, inner, at = data[at] >> 4, data[at] & 15, at + 1
        if num == 15:
            num, at = _unsigned(data, at)
        items = []
        for _ in range(num):
            item, at = _value(data, at, inner)
            items.append(item)
        return [inner, items], at
    if kind == _STRUCT:
        return decoded(data, at)
    width = 8 if kind == _DOUBLE else 1
    return data[at : at + width].hex(), at + width


def _of_value(kind: int, value: Any) -> bytes:
    if kind in _BOOLS:
        return b""
    if kind in _NUMBERS:
        return _of_signed(value if isinstance(value, int) else 0)
    if kind in _LISTS:
        inner, items = value if isinstance(value, list) and len(value) == 2 else (8, [])
        inner, items = inner % 16 if isinstance(inner, int) else 8, items if isinstance(items, list) else []
        head = bytes([len(items) << 4 | inner]) if len(items) < 15 else bytes([0xF0 | inner]) + _of_unsigned(len(items))
        return head + b"".join(_of_value(inner, item) for item in items)
    if kind == _STRUCT:
        return encoded(value)
    data = _bytes(value)
    return _of_unsigned(len(data)) + data if kind == _BINARY else data.ljust(8, b"\0")[: 8 if kind == _DOUBLE else 1]


def _bytes(value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        return str(value).encode(errors="replace")


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return value >> 1 ^ -(value & 1), at


def _of_unsigned(value: int) -> bytes:
    value %= 1 << 70
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _of_signed(value: int) -> bytes:
    return _of_unsigned(2 * value if value >= 0 else -2 * value - 1)
