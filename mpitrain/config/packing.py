"""The text of settings as the meta of a checkpoint holds it: packed if it is long.

A list of fifty thousand shards has 10 MB, and the meta of a checkpoint is a line of at most 8 MiB.
"""

from __future__ import annotations

import base64
import zlib

from mpitrain.config.errors import ConfigError
from mpitrain.files import MOST_SETTINGS_BYTES

_LONG, _MOST_PACKED = 4 << 20, 6 << 20
_MARK = "zlib:"
"""No text of settings begins so."""


def packed(text: str) -> str:
    """The text for the meta. ConfigError if settings are longer than a checkpoint can hold."""
    if len(text) <= _LONG:
        return text
    data = text.encode()
    found = _MARK + base64.b64encode(zlib.compress(data)).decode()
    if len(data) > MOST_SETTINGS_BYTES or len(found) > _MOST_PACKED:
        raise ConfigError(
            f"the settings have {len(data):,} bytes, {len(found):,} of them packed; expected at most {MOST_SETTINGS_BYTES:,} and "
            f"{_MOST_PACKED:,}: give fewer shards, or patterns for their names"
        )
    return found


def unpacked(text: str) -> str:
    """The text of settings in a meta. ConfigError for what `packed` has not made, also for more than settings may have."""
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
