"""zip files as torch writes them, of which any field of the records, the directory and the end may say anything."""

import io
import struct
import zipfile
import zlib
from random import Random
from typing import Any, NamedTuple

from fuzzing.mutation import NUMBERS

ZIP = "the zip file"
"""A part that is no record: the changes of the zip file's own fields, each a dict as of JSON."""

_ALIGNED = 64
_LOCAL = ("mark", "version", "flags", "method", "time", "date", "crc", "packed", "size", "name_length", "extra_length")
_ENTRY = ("mark", "made_by", *_LOCAL[1:], "comment_length", "disk", "internal", "external", "offset")
_END = ("mark", "disk", "first_disk", "here", "count", "length", "offset", "comment_length")
_END_64 = ("mark", "own_length", "made_by", "version", "disk", "first_disk", "here", "count", "length", "offset")
_LOCATOR = ("mark", "disk", "at", "disks")
_KINDS = {
    "local": (_LOCAL, "<4s5H3L2H"),
    "entry": (_ENTRY, "<4s6H3L5H2L"),
    "end": (_END, "<4s4H2LH"),
    "end_64": (_END_64, "<4sQ2H2L4Q"),
    "locator": (_LOCATOR, "<4sLQL"),
}
_MARKS = {"local": b"PK\3\4", "entry": b"PK\1\2", "end": b"PK\5\6", "end_64": b"PK\6\6", "locator": b"PK\6\7"}
_NAMES = [
    *("archive/data.pkl", "archive/DATA.PKL", "data.pkl", "archive/data/0", "archive/data/1", "archive/version"),
    *(
        "../x",
        "/etc/passwd",
        "",
        "archive/data/0\0x",
        "archive\\data\\0",
        "a" * 3000,
        "archive/byteorder",
        "other/data.pkl",
    ),
]
_SIZES_64 = ("size", "packed", "offset")


def change(rng: Random, num_records: int) -> dict[str, Any]:
    """One change of a zip file with that number of records."""
    record = rng.randrange(num_records)
    kind = rng.choice(
        ["field", "field", "field", "name", "twice", "packed", "wide", "between", "order", "gone", "descriptor"]
    )
    if kind == "field":
        place = rng.choice(list(_KINDS))
        field = rng.choice(_KINDS[place][0][1:])
        return {
            "kind": kind,
            "place": place,
            "record": record,
            "field": field,
            "value": rng.choice([*NUMBERS, "+1", "-1"]),
        }
    if kind == "wide":
        sizes = [rng.choice([*NUMBERS, "same", "same", "same"]) for _ in _SIZES_64]
        return {"kind": kind, "place": rng.choice(["local", "entry"]), "record": record, "sizes": sizes}
    return {
        "kind": kind,
        "place": rng.choice(["local", "entry", "both"]),
        "record": record,
        "name": rng.choice(_NAMES),
        "method": rng.choice([1, 8, 8, 12, 14, 93, 99]),
        "bytes": rng.choice([1, 22, 4096]),
    }


class _Record(NamedTuple):
    name: dict[str, bytes]  # in the record and in the directory
    data: bytes
    packed: bytes
    method: int
    has_descriptor: bool


def archive_of(contents: dict[str, bytes], changes: list[dict[str, Any]]) -> bytes:
    """A zip file with these changes. Checksums and lengths fit, as far as no change says something else of them."""
    records = [_record(name.encode(), data) for name, data in contents.items()]
    for its in changes:
        _change_records(records, its)
    file, entries = io.BytesIO(), []
    for number, record in enumerate(records):
        if its := _find(changes, "between", number):
            file.write(b"PK" * its["bytes"])
        offset = file.tell()
        gap = -(offset + 30 + len(record.name["local"]) + 4) % _ALIGNED
        extra = b"FB" + gap.to_bytes(2, "little") + b"Z" * gap
        sizes = {"crc": zlib.crc32(record.data), "packed": len(record.packed), "size": len(record.data)}
        values = {
            **sizes,
            "method": record.method,
            "version": 20,
            "flags": 0x808 if record.has_descriptor else 0x800,
            "offset": offset,
        }
        file.write(_headed("local", values, changes, number, record.name["local"], extra))
        file.write(record.packed)
        if record.has_descriptor:
            file.write(struct.pack("<4s3L", b"PK\7\x08", sizes["crc"], sizes["packed"], sizes["size"]))
        entries.append(_headed("entry", values, changes, number, record.name["entry"], b""))
    if _find(changes, "order"):
        entries.reverse()
    if (its := _find(changes, "gone")) and its["record"] < len(entries):
        del entries[its["record"]]
    start = file.tell()
    file.write(b"".join(entries))
    return file.getvalue() + _ending(start, file.tell() - start, len(entries), changes)


def is_zip(content: bytes) -> bool:
    """Whether all records have the checksum of their bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(record.file_size for record in archive.infolist()) > 1 << 20:
                return True  # too long to be unpacked here
            return archive.testzip() is None
    except Exception:
        return False


def _record(name: bytes, data: bytes) -> _Record:
    return _Record({"local": name, "entry": name}, data, data, zipfile.ZIP_STORED, False)


def _change_records(records: list[_Record], its: dict[str, Any]) -> None:
    at = min(its["record"], len(records) - 1)
    kind, record = its["kind"], records[at]
    if kind == "name":
        places = ("local", "entry") if its["place"] == "both" else (its["place"],)
        records[at] = record._replace(name={**record.name, **dict.fromkeys(places, its["name"].encode())})
    elif kind == "twice":
        records.append(record)
    elif kind == "packed":
        method, packer = its["method"], zlib.compressobj(9, zlib.DEFLATED, -15)
        data = record.data + bytes(20 << 20) if its["bytes"] == 22 else record.data  # a bomb of 20 kB
        packed = packer.compress(data) + packer.flush() if method == 8 else data
        records[at] = record._replace(data=data, packed=packed, method=method)
    elif kind == "descriptor":
        records[at] = record._replace(has_descriptor=True)


def _find(changes: list[dict[str, Any]], kind: str, record: int | None = None) -> dict[str, Any] | None:
    return next((its for its in changes if its["kind"] == kind and record in (None, its["record"])), None)


def _headed(
    place: str, values: dict[str, Any], changes: list[dict[str, Any]], number: int, name: bytes, extra: bytes
) -> bytes:
    if (its := _find(changes, "wide", number)) and its["place"] == place:
        told = [values[field] if size == "same" else size for field, size in zip(_SIZES_64, its["sizes"], strict=True)]
        extra = struct.pack("<2H3Q", 1, 24, *(number & (1 << 64) - 1 for number in told)) + extra
        values = {**values, **dict.fromkeys(_SIZES_64, 0xFFFFFFFF)}
    values = {**values, "name_length": len(name), "extra_length": len(extra)}
    return _packed(place, values, changes, number) + name + extra


def _ending(start: int, length: int, count: int, changes: list[dict[str, Any]]) -> bytes:
    values = {"length": length, "offset": start, "here": count, "count": count}
    ending = b""
    if any(its["kind"] == "field" and its["place"] in ("end_64", "locator") for its in changes):
        ending = _packed("end_64", {**values, "own_length": 44, "version": 45}, changes)
        ending += _packed("locator", {"at": start + length, "disks": 1}, changes)
        values = {"length": 0xFFFFFFFF, "offset": 0xFFFFFFFF, "here": 0xFFFF, "count": 0xFFFF}
    return ending + _packed("end", values, changes)


def _packed(place: str, values: dict[str, Any], changes: list[dict[str, Any]], number: int | None = None) -> bytes:
    fields, layout = _KINDS[place]
    told = {field: values.get(field, 0) for field in fields}
    for its in changes:
        if (its["kind"], its.get("place")) == ("field", place) and number in (None, its["record"]):
            value = its["value"]
            told[its["field"]] = told[its["field"]] + int(value) if isinstance(value, str) else value
    told["mark"] = _MARKS[place]
    sizes = [struct.calcsize(f"<{letter}") for letter in _letters(layout)]
    numbers = [told[field] & (1 << 8 * size) - 1 for field, size in zip(fields[1:], sizes, strict=True)]
    return struct.pack(layout, told["mark"], *numbers)


def _letters(layout: str) -> str:
    """The letters of a layout behind its mark: "2HL" has "HHL"."""
    letters, count = "", ""
    for sign in layout.removeprefix("<4s"):
        if sign.isdecimal():
            count += sign
        else:
            letters, count = letters + sign * int(count or 1), ""
    return letters
