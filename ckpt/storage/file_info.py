"""What remote stores say of a file, in the many words of fsspec's file systems: its size, and a version."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

_ETAGS = ("ETag", "etag", "e_tag")
_CONTENTS = ("generation", "md5Hash", "blob_id", "sha", "CRC")  # of other stores, and of files in archives
_TIMES = (
    *("LastModified", "last_modified", "Last-Modified", "updated", "modificationTime", "modification_time", "modify"),
    *("modified", "last_write_time", "mtime", "created", "ino"),
)  # fmt: skip

_AT, _WEAK = "time ", "W/"  # what versions begin with that are times, or weak ETags


class FileInfo(NamedTuple):
    """A file. `size`: bytes. `version`: a text that differs after the file was replaced; "": the store says none."""

    size: int
    version: str


def info_of(fs: Any, path: str, entry: Mapping[str, Any]) -> FileInfo | None:
    """What a store says of a file in `entry`, of a list or of the file alone. None if it does not say how long the file is."""
    if entry.get("size") is None:  # a web server's list of links has no sizes
        entry = fs.info(path)
    size = entry.get("size")
    return None if size is None else FileInfo(int(size), version_of(entry))


def known_info(fs: Any, path: str, entry: Mapping[str, Any]) -> FileInfo:
    """See `info_of`. OSError in place of None."""
    if (info := info_of(fs, path, entry)) is None:
        raise OSError("the server does not say how long it is")
    return info


def version_of(entry: Mapping[str, Any]) -> str:
    """The version of a file. It is the same in a list of a store as of the file alone: there, times often have other digits.

    Weak ETags come last: the servers that share the load of a web site may each have their own.
    """
    if (etag := _first(entry, _ETAGS)) and not etag.startswith(_WEAK):
        return etag.strip('"')
    if content := _first(entry, _CONTENTS):
        return content
    times = " ".join(_text(entry[key]) for key in _TIMES if entry.get(key))
    return f"{_AT}{times}" if times else etag


def is_of_contents(version: str, size: int) -> bool:
    """Whether two files of `size` bytes with this version, at two addresses, are the same for certain.

    Times and weak ETags do not say so, and neither do ETags that are made of time and size, as those of nginx and Apache.
    """
    return bool(version) and not version.startswith((_AT, _WEAK)) and f"{size:x}" not in version.lower().split("-")


def _text(time: object) -> str:
    return str(
        time.timestamp() if isinstance(time, datetime) else time
    )  # fsspec's memory has one in lists, the other of a file


def _first(entry: Mapping[str, Any], keys: Sequence[str]) -> str:
    return next((str(entry[key]) for key in keys if entry.get(key)), "")
