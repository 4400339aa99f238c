"""Parquet files: the footer, the headers of the pages and what is in them say anything, with sizes, places and CRCs that fit."""

import io
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.target import Files, Parts, Sound, Target
from fuzzing.thrift import decoded, encoded

from mpitrain.job.data.documents import DamagedSampleError, DamagedShardError, Reader, open_shard
from mpitrain.job.data.documents.parquet import CutLimits, ParquetReader

_MAGIC = b"PAR1"
_FOOTER, _CODEC = "footer", "codec"
_SMALL = CutLimits(piece_bytes=1000, held_bytes=2000, most_bytes=1 << 20)
_TEXTS = [*(f"text of row {n % 7} " * (n % 9) for n in range(60)), None, "ü"]
_LENGTHS = {"text": "DELTA_LENGTH_BYTE_ARRAY"}
_KINDS: tuple[dict[str, Any], ...] = (
    {"compression": "none"},
    {"compression": "zstd"},
    {"compression": "snappy", "write_page_checksum": True},
    {"compression": "gzip", "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    {
        "compression": "none",
        "use_dictionary": False,
        "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"},
        "data_page_version": "2.0",
    },
    {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "store_schema": False},
)


@cache
def made(kind: int) -> tuple[str, dict[str, Any], list[list[tuple[dict[str, Any], bytes]]]]:
    """A file of several row groups: its codec, its footer, and for each row group the headers and contents of its pages."""
    import pyarrow as arrow
    from pyarrow import parquet

    table, file = arrow.table({"text": _TEXTS}), io.BytesIO()
    parquet.write_table(table, file, row_group_size=25, data_page_size=300, **_KINDS[kind])
    data, codec = file.getvalue(), _KINDS[kind]["compression"]
    footer = decoded(data[-8 - int.from_bytes(data[-8:-4], "little") : -8])[0]
    groups = []
    for group in footer["4"][1][1]:
        its = group["1"][1][1][0]["3"][1]
        at = min(its[key][1] for key in ("9", "11") if key in its)
        end, pages = at + its["7"][1], []
        while at < end:
            header, at = decoded(data, at)
            packed, at = data[at : at + header["3"][1]], at + header["3"][1]
            body = packed if codec == "none" else arrow.Codec(codec).decompress(packed, header["2"][1], asbytes=True)
            pages.append((header, body))
        groups.append(pages)
    return codec, footer, groups


class Parquet(Target):
    errors = (DamagedShardError,)

    def missing(self) -> str | None:
        return None if find_spec("pyarrow") else "needs pyarrow"

    share_sound = 0.1

    def sound(self, rng: Random) -> Sound:
        codec, footer, groups = made(rng.randrange(len(_KINDS)))
        parts: Parts = {_FOOTER: _copied(footer), _CODEC: lambda path: codec}
        for group, pages in enumerate(groups):
            for number, (header, body) in enumerate(pages):
                parts[f"header {group} {number}"], parts[f"body {group} {number}"] = _copied(header), body
        return Sound(parts, [None if text is None else text.encode() for text in _TEXTS])

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        kind = rng.choice([_FOOTER, "header", "body"])
        chosen = rng.choice([name for name in parts if name.startswith(kind)])
        return {**parts, **super().mutate(rng, {chosen: parts[chosen]})}

    def wrap(self, rng: Random, parts: Parts) -> Files:
        """All lies about sizes and places are mended, except in some files."""
        codec, mends = parts[_CODEC](Path()), rng.random() < 0.7
        data, chunks = _MAGIC, dict[int, list[int]]()  # where the pages of a row group begin, and the last one ends
        for name, header in parts.items():
            if not name.startswith("header"):
                continue
            group, number = map(int, name.split()[1:])
            body = parts[f"body {group} {number}"]
            packed = body if codec == "none" else _compressed(codec, body)
            if mends and isinstance(header, dict):
                header |= {"2": [5, len(body)], "3": [5, len(packed)]}
                if "4" in header:
                    crc = zlib.crc32(packed)
                    header["4"] = [5, crc - (crc >> 31 << 32)]
            chunks.setdefault(group, []).append(len(data))
            data += encoded(header) + packed
        footer = parts[_FOOTER]
        ends = [chunks[group + 1][0] if group + 1 in chunks else len(data) for group in chunks]
        if mends:
            for group, (places, end) in enumerate(zip(chunks.values(), ends, strict=True)):
                _mend(footer, group, places, end)
        tail = encoded(footer)
        return {"a.parquet": data + tail + len(tail).to_bytes(4, "little") + _MAGIC}

    def passes(self, files: Files) -> bool:
        data = files["a.parquet"]
        assert isinstance(data, bytes)
        fits = 12 + int.from_bytes(data[-8:-4], "little") <= len(data)
        return data[:4] == data[-4:] == _MAGIC and fits

    def read(self, folder: Path) -> object:
        path = folder / "a.parquet"
        whole = _documents(open_shard(path, "a.parquet", "parquet"), path.stat().st_size)
        assert _documents(ParquetReader(path, "a.parquet", limits=_SMALL), path.stat().st_size) == whole
        assert len({key for key, _ in whole}) == len(whole)
        return [text for _, text in whole]


def _documents(reader: Reader, size: int) -> list[tuple[bytes, bytes | None]]:
    found: list[tuple[bytes, bytes | None]] = []
    for begin in range(0, size, 700):
        cut = reader.cut(begin, begin + 700)
        for index in range(len(cut)):
            try:
                found.append((cut.key(index), cut.text(index)))
            except DamagedSampleError:
                found.append((cut.key(index), None))
    reader.close()
    return found


def _compressed(codec: str, body: bytes) -> bytes:
    import pyarrow as arrow

    packed: bytes = arrow.Codec(codec).compress(body, asbytes=True)
    return packed


def _mend(footer: Any, group: int, places: list[int], end: int) -> None:
    """Let the footer say where the pages of a row group are, if it still has the row group."""
    try:
        its = footer["4"][1][1][group]["1"][1][1][0]["3"][1]
        at = iter(places)
        if "11" in its:
            its["11"] = [6, next(at)]
        its |= {"9": [6, next(at)], "7": [6, end - places[0]]}
    except (TypeError, KeyError, IndexError, StopIteration, AttributeError):
        return


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


TARGET = Parquet()
