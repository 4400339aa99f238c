"""The text of settings as the meta of a checkpoint holds it: packed if it is long.

A list of fifty thousand shards has 10 MB, and the meta of a checkpoint is a line of at most 8 MiB with 524,288 values, for which its
readers count each colon and comma.
"""

from __future__ import annotations

import base64
import zlib
from functools import lru_cache

from mpitrain.files import MOST_SETTINGS_BYTES, toml_of_bytes
from mpitrain.job.config.errors import ConfigError

_LONG = 256 << 10
"""Bytes. As a part of a line of JSON they are at most three times that, and hold fewer colons and commas than it may have."""
_MOST_PACKED = 6 << 20
_MARK = "zlib:"
"""No text of settings begins so."""


@lru_cache(1)  # each save has the same settings, and these may take a second
def packed_settings(text: str) -> str:
    """The text of settings for the meta. ConfigError if a checkpoint cannot hold it, or if it is one that no reader takes."""
    data = text.encode()
    if len(data) <= _LONG:  # no limit of a reader is so low
        return text
    found = _MARK + base64.b64encode(zlib.compress(data)).decode()
    fewer = "give fewer shards, or patterns for their names"
    if len(data) > MOST_SETTINGS_BYTES or len(found) > _MOST_PACKED:
        raise ConfigError(
            f"the settings have {len(data):,} bytes, {len(found):,} of them packed; expected at most {MOST_SETTINGS_BYTES:,} and "
            f"{_MOST_PACKED:,}: {fewer}"
        )
    try:
        toml_of_bytes(data)
    except ValueError as error:
        raise ConfigError(f"the settings, as a checkpoint holds them, cannot be read again: {error}; {fewer}") from None
    return found


def unpacked_settings(text: str) -> str:
    """The text of settings in a meta. ConfigError for what `packed_settings` has not made, also for more than settings may have."""
    if not text.startswith(_MARK):
        return text
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(text[len(_MARK) :]), MOST_SETTINGS_BYTES)
        if unpacker.eof:
            return data.decode()
    except (zlib.error, ValueError):
        pass
    raise ConfigError(f"the settings in the checkpoint are damaged, or have more than {MOST_SETTINGS_BYTES:,} bytes")
