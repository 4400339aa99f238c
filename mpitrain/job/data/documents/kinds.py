"""Which reader opens a shard: the ending of its name decides."""

import re
from pathlib import Path
from typing import Literal

from mpitrain.job.data.documents.lines import LinesReader
from mpitrain.job.data.documents.parquet import ParquetReader
from mpitrain.job.data.documents.reading import MappedFile, Reader
from mpitrain.job.data.documents.tar import TarReader
from mpitrain.job.data.documents.text import TextReader

Kind = Literal["tar", "lines", "parquet", "text"]

_SUFFIXES: dict[str, Kind] = {
    ".tar": "tar", ".parquet": "parquet",
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".jsonlines": "lines", ".ldjson": "lines",
}  # fmt: skip
COMPRESSED = (".gz", ".zst")
"""Endings after that of the kind: such a shard is unpacked before it is read."""

_KNOWN = (*_SUFFIXES, *COMPRESSED, ".tgz", ".sha256", ".md5")  # the last two: see checksums.py
_QUERY_OR_FRAGMENT = re.compile(r"[?#].*", re.DOTALL)  # of http
_QUERY = re.compile(r"\?.*", re.DOTALL)  # of others: # is a usual character in their names


def ending_of(name: str) -> str:
    """A name, path or address up to the ending that tells what is in the file: without what follows the path of an address.

    If the path has no known ending, but the query ends in one, as in https://host/get?file=a.jsonl, it is all up to there.
    """
    scheme = name.partition("://")[0] if "://" in name else ""
    is_web = scheme.lower().rpartition("::")[2] in ("http", "https")
    rest = _QUERY_OR_FRAGMENT if is_web else _QUERY
    begin = name.rfind("/") + 1 if name.startswith("/") else 0  # a folder of this machine may have any name
    path, whole = name[:begin] + rest.sub("", name[begin:]), name.partition("#")[0] if is_web else name
    return whole if whole.lower().endswith(_KNOWN) and not path.lower().endswith(_KNOWN) else path


def kind_of(name: str) -> Kind:
    """The kind of a shard with this name or address, in small or capital letters. Files with other endings are texts."""
    name = ending_of(name).lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith(".tgz"):
        return "tar"
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), "text")


def is_compressed(name: str) -> bool:
    """Whether a shard must be unpacked as a whole before any part of it can be read."""
    return ending_of(name).lower().endswith((*COMPRESSED, ".tgz"))


def has_kind_as_before(name: str, before: str) -> bool:
    """Whether readers of version 1 took a shard with the name `before`, which is `name` now, for what it is. See reading.VERSION."""
    kind, plain = "text", before
    for ending in COMPRESSED:
        plain = plain.removesuffix(ending)
    if plain.endswith((".tar", ".tgz")):
        kind = "tar"
    elif plain.endswith((".jsonl", ".ndjson")):
        kind = "lines"
    elif plain.endswith(".parquet"):
        kind = "parquet"
    return (kind, before.endswith((*COMPRESSED, ".tgz"))) == (kind_of(name), is_compressed(name))


def open_shard(path: Path, name: str, kind: Kind, field: str | None = None) -> Reader:
    """Open a shard that is not compressed, or its unpacked copy at `path`.

    `name`: for messages and keys. `field`: the field, column or part that is the text; None: the usual one.

    DamagedShardError if it is none of this kind, OSError if it cannot be read, ImportError if a library is missing.
    """
    match kind:
        case "tar":
            return TarReader(MappedFile(path, name), field)
        case "lines":
            return LinesReader(path, name, field or "text")
        case "parquet":
            return ParquetReader(path, name, field or "text")
        case "text":
            return TextReader(path, name)
