"""Documents in shards: files with many documents each, of which any part can be read.

A reader maps a file into memory. Its `cut(begin, end)` returns the documents whose first byte is one of the bytes `begin` to `end - 1`.
So the parts of a shard can be counted from its size alone, before it is opened. Names are keys, and never paths: nothing is unpacked.
"""

from mpitrain.job.data.documents.kinds import Kind, ending_of, has_kind_as_before, is_compressed, kind_of, open_shard
from mpitrain.job.data.documents.reading import (
    VERSION,
    Cut,
    DamagedSampleError,
    DamagedShardError,
    Reader,
    checked_text,
    with_more_files,
)

__all__ = [
    "VERSION",
    "Cut",
    "DamagedSampleError",
    "DamagedShardError",
    "Kind",
    "Reader",
    "checked_text",
    "ending_of",
    "has_kind_as_before",
    "is_compressed",
    "kind_of",
    "open_shard",
    "with_more_files",
]
