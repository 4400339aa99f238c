"""The documents that the settings of a run name, in pieces that ranks can read independently of each other.

The pieces depend on the settings, and on the names and sizes of the shards, alone: not on the number of ranks.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.job.config import ConfigError, DataConfig
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.corpus import scan
from mpitrain.job.data.documents import Cut, Kind, is_compressed
from mpitrain.job.data.loading import has_documents
from mpitrain.job.data.open_shards import OpenShards
from mpitrain.job.data.remarks import Remark, say_remark
from mpitrain.job.data.shards import ShardList, list_shards

_NUM_PIECES, _MOST_PIECES = 1024, 16384  # each file of tokens takes a descriptor of each rank of a run
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 1 << 20, 128 << 20


class Origin(NamedTuple):
    """A source of documents. `field`: see `open_shard`. `kind`: of all shards; None: the names tell it."""

    name: str
    shards: ShardList
    field: str | None = None
    kind: Kind | None = None

    def opened(self, cache: ShardCache) -> OpenShards:
        """The shards on this process."""
        if self.kind is not None:
            return OpenShards(self.shards, _as_it_is, field=self.field, kind=self.kind)
        return OpenShards(self.shards, cache.local, field=self.field, say=say_remark)

    def fingerprint(self) -> str:
        """A hash of the names and sizes of the shards."""
        digest = hashlib.blake2b(self.shards.sizes.astype("<i8").tobytes(), digest_size=8)
        digest.update("\0".join(self.shards.names).encode(errors="surrogateescape"))
        return digest.hexdigest()

    def mark(self) -> str:
        """A hash of what the names hide; "" if they hide nothing but users and signatures."""
        marks = "\0".join(self.shards.marks) if any(self.shards.marks) else ""
        return hashlib.blake2b(marks.encode(), digest_size=8).hexdigest() if marks else ""


class DocumentPart(NamedTuple):
    """The documents that begin at the bytes `begin` to `end - 1` of a shard."""

    shard: int
    begin: int
    end: int


class DocumentPiece(NamedTuple):
    """Neighbouring documents of a source. `name`: of its files, without an ending. `num_bytes`: of the shards."""

    name: str
    origin: int
    parts: tuple[DocumentPart, ...]
    num_bytes: int


def find(config: DataConfig) -> list[Origin]:
    """Find the sources. ValueError if there are none, or they cannot be read."""
    if config.has_tokens:
        raise ConfigError(f"data.path: expected text or shards of documents, got files of tokens: {config.path[0]}")
    if has_documents(config):
        return [Origin(each.name, list_shards(each.path), each.field) for each in config.document_sources]
    listing = scan(config.path, config.suffixes, heldout=0.0, follow_links=config.follow_links, field=config.field)
    for remark in listing.remarks:
        say_remark(Remark(remark))
    files = listing.train.pieces
    sizes = np.array([file.file_bytes for file in files], np.int64)
    shards = ShardList("", tuple(file.name for file in files), tuple(str(file.path) for file in files), sizes)
    return [Origin("text", shards, kind="text")]


def pieces_of(origins: Sequence[Origin], piece_bytes: int | None = None) -> list[DocumentPiece]:
    """All documents in pieces of about `piece_bytes` bytes: parts of large shards, or several small ones.

    A compressed shard is one part. Default: about a thousand pieces of 1 to 128 MiB.
    """
    total = sum(int(origin.shards.sizes.sum()) for origin in origins)
    wanted = min(max(total // _NUM_PIECES, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)
    limit = piece_bytes or max(wanted, total // _MOST_PIECES)
    pieces = []
    for index, origin in enumerate(origins):
        for number, parts in enumerate(_grouped(_parts(origin, limit), limit)):
            num_bytes = sum(part.end - part.begin for part in parts)
            pieces.append(DocumentPiece(f"{origin.name}-{number:06}", index, tuple(parts), num_bytes))
    return pieces


def cuts_of(piece: DocumentPiece, opened: OpenShards) -> Iterator[Cut]:
    """The documents of a piece. `opened`: its source."""
    for part in piece.parts:
        yield opened.cut(*part)


def _parts(origin: Origin, limit: int) -> Iterator[DocumentPart]:
    for shard, (path, size) in enumerate(zip(origin.shards.paths, origin.shards.sizes.tolist(), strict=True)):
        step = size if is_compressed(path) and origin.kind is None else limit
        yield from (DocumentPart(shard, begin, min(begin + step, size)) for begin in range(0, size, step))


def _grouped(parts: Iterator[DocumentPart], limit: int) -> Iterator[list[DocumentPart]]:
    """Neighbours, as many as do not have more bytes than the limit."""
    group: list[DocumentPart] = []
    num_bytes = 0
    for part in parts:
        if group and num_bytes + part.end - part.begin > limit:
            yield group
            group, num_bytes = [], 0
        group.append(part)
        num_bytes += part.end - part.begin
    if group:
        yield group


def _as_it_is(path: str, size: int) -> AbstractContextManager[Path]:
    return nullcontext(Path(path))
