"""TensorBoard's event files: records of protobuf messages, encoded by hand.

Sources: TensorFlow's record_writer.cc for the records. TensorBoard's event.proto, summary.proto and tensor.proto, and plugin_data.proto
of its plugin hparams, for the messages. The numbers in calls such as `bytes_field(5, ...)` are those of fields in these files.
"""

import functools
import math
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_MOST_FLOAT32 = 3.4028234663852886e38
_MOST_FORMS = 64  # that are kept
_MOST_SCALARS = 50  # of an event: 1 kB of tables for each of its bytes
_double = struct.Struct("<d").pack
_uint32 = struct.Struct("<I").pack


class EventFile:
    """A new file of events, which readers see at once. FileExistsError if there is a file at `path`."""

    def __init__(self, path: Path, time_s: float) -> None:
        """`time_s`: of the beginning, as unix time."""
        self._file = path.open("xb", buffering=0)
        self._forms: dict[tuple[tuple[str, ...], int], _Form] = {}
        self.write(time_s, None, bytes_field(3, b"brain.Event:2"))

    def write(self, time_s: float, step: int | None, what: bytes) -> None:
        """Append an event. `what`: its fields but time and step. OSError if the disk is full."""
        event = b"\x09" + _double(time_s) + (b"" if step is None else b"\x10" + varint(step)) + what
        self._append(_head(len(event)) + event + _uint32(_masked(crc32c(event))))

    def write_scalars(self, time_s: float, step: int, tags: tuple[str, ...], values: Sequence[float]) -> None:
        """Append summaries with a scalar of float32 for each tag. OSError if the disk is full."""
        for first in range(0, len(tags), _MOST_SCALARS):
            part = slice(first, first + _MOST_SCALARS)
            self._append(self._form(tags[part], step).record(time_s, step, values[part]))

    def _form(self, tags: tuple[str, ...], step: int) -> "_Form":
        key = tags, len(varint(step))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            form = self._forms[key] = _Form(*key)
        return form

    def _append(self, record: bytes) -> None:
        if self._file.write(record) != len(record):
            raise OSError(f"{self._file.name} cannot be written: the disk may be full")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# Contents of events


def session_start() -> bytes:
    """A session log that says START: what other files have of the event's step and of later steps is void."""
    return bytes_field(7, b"\x08\x01")


def text(tag: str, markdown: str) -> bytes:
    """A summary for the plugin text."""
    tensor = b"\x08\x07" + bytes_field(2, bytes_field(2, b"\x08\x01")) + bytes_field(8, markdown.encode())  # 1 string
    metadata = bytes_field(1, bytes_field(1, b"text"))
    return bytes_field(
        5, bytes_field(1, bytes_field(1, tag.encode()) + bytes_field(8, tensor) + bytes_field(9, metadata))
    )


def hparams(settings: dict[str, Any], time_s: float) -> bytes:
    """A summary for the plugin hparams: the settings of a run that has begun at `time_s`."""
    entries = b"".join(
        bytes_field(1, bytes_field(1, name.encode()) + bytes_field(2, _value(setting)))
        for name, setting in settings.items()
    )
    content = bytes_field(3, entries + b"\x29" + _double(time_s))
    metadata = bytes_field(1, bytes_field(1, b"hparams") + bytes_field(2, content))
    return bytes_field(5, bytes_field(1, bytes_field(1, b"_hparams_/session_start_info") + bytes_field(9, metadata)))


def _value(setting: Any) -> bytes:
    """A google.protobuf.Value."""
    if isinstance(setting, bool):
        return b"\x20" + varint(setting)
    if isinstance(setting, int | float):
        return b"\x11" + _double(setting)
    return bytes_field(3, ("" if setting is None else str(setting)).encode())


# Encoding


def varint(number: int) -> bytes:
    """A number of at least 0 in groups of 7 bits."""
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def bytes_field(number: int, content: bytes) -> bytes:
    """A field of variable length: text, bytes or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


@functools.lru_cache(maxsize=256)
def _head(length: int) -> bytes:
    """The beginning of a record: the length of its event."""
    head = struct.pack("<Q", length)
    return head + _uint32(_masked(crc32c(head)))


def crc32c(message: bytes) -> int:
    """The CRC-32C of a message."""
    table = _tables(1)[0]
    crc = 0xFFFFFFFF
    for byte in message:
        crc = table[crc & 255 ^ byte] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """A CRC rotated and moved as the records have it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_all_tables: list["array[int]"] = []


def _tables(num: int) -> Sequence["array[int]"]:
    """At least `num` tables of 256 numbers: what each value of a byte with 0, 1, 2, ... bytes after it adds to a CRC, by exclusive or.

    The first 8 are those of "slicing by 8" (Kounavis and Berry 2005).
    """
    tables = _all_tables
    if not tables:
        row = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            row = np.where(row & 1, row >> 1 ^ np.uint32(0x82F63B78), row >> 1)  # the polynomial, bits reversed
        tables.append(array("I", row.tobytes()))
    first, last = (np.frombuffer(tables[place], np.uint32) for place in (0, -1))
    while len(tables) < num:
        last = first[last & 255] ^ last >> 8
        tables.append(array("I", last.tobytes()))
    return tables


class _Form:
    """Events with scalars of the same tags, which differ in few bytes: in those of the time, the step and the values.

    A CRC is linear: the one of an event is that of the event with zeros there, and, by exclusive or, what each of these bytes adds.
    This takes 70 look-ups for 15 scalars instead of 430.
    """

    def __init__(self, tags: tuple[str, ...], step_bytes: int) -> None:
        """`step_bytes`: of the number of the step."""
        heads = [bytes_field(1, tag.encode()) + b"\x15" for tag in tags]
        heads = [b"\x0a" + varint(len(head) + 4) + head for head in heads]
        summary = b"\x2a" + varint(sum(len(head) + 4 for head in heads))
        self._parts: list[Any] = [b"\x09", 0.0, b"\x10", bytes(step_bytes), summary]
        for head in heads:
            self._parts += (head, 0.0)
        self._whole = struct.Struct(f"<1sd1s{step_bytes}s{len(summary)}s" + "".join(f"{len(head)}sf" for head in heads))
        self._changing = struct.Struct(f"<d{step_bytes}s{len(tags)}f")
        self._head = _head(self._whole.size)
        self._crc = crc32c(self._whole.pack(*self._parts))
        places, at = [*range(1, 9), *range(10, 10 + step_bytes)], 10 + step_bytes + len(summary)
        for head in heads:
            at += len(head) + 4
            places += range(at - 4, at)
        tables = _tables(at)
        self._tables = [tables[at - 1 - place] for place in places]

    def record(self, time_s: float, step: int, values: Sequence[float]) -> bytes:
        """The record of an event."""
        parts, number = self._parts, varint(step)
        parts[1], parts[3], parts[6::2] = time_s, number, values
        try:
            changing = self._changing.pack(time_s, number, *values)
        except OverflowError:
            limited = [math.copysign(math.inf, value) if abs(value) > _MOST_FLOAT32 else value for value in values]
            return self.record(time_s, step, limited)
        crc = self._crc
        for table, byte in zip(self._tables, changing, strict=True):
            crc ^= table[byte]
        return self._head + self._whole.pack(*parts) + _uint32(_masked(crc))
