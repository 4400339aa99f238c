"""The data of a run: a corpus in the shared memory of a node, or sources of documents."""

import errno
import glob
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives import Communicator
from collectives.transports.node.anonymous import available_bytes
from collectives.transports.node.memory import say_short
from mpitrain.job.config import ConfigError, DataConfig, SourceConfig
from mpitrain.job.data.cache import ShardCache, cache_folder, needs_copy
from mpitrain.job.data.checksums import is_checksum_list
from mpitrain.job.data.corpus import Listing, Part, read_into, scan
from mpitrain.job.data.documents import is_compressed, kind_of
from mpitrain.job.data.open_shards import OpenShards, first_texts
from mpitrain.job.data.remarks import Remark, say_remark
from mpitrain.job.data.shards import ShardList, list_shards
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.tokenizers import JsonTokenizer, Tokenizer
from mpitrain.job.data.tokens import TokenFiles, open_tokens
from mpitrain.placement.rank0 import on_rank0

_log = logging.getLogger("mpitrain")
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class Corpus(NamedTuple):
    """Tokens are bytes: 1-D uint8, shared by the ranks of a node, which must not write to them."""

    train: np.ndarray
    heldout: np.ndarray
    num_files: int
    fingerprint: str  # hash of names, sizes and split

    def __str__(self) -> str:
        sizes = len(self.train) / 1e6, len(self.heldout) / 1e6
        return f"{self.num_files} files, {sizes[0]:.1f} MB to train on, {sizes[1]:.2f} MB held out"


class DocumentSources(NamedTuple):
    """Sources of documents. `heldout`: the sources of evaluation; None: a share of the training documents."""

    train: tuple[DocumentSource, ...]
    heldout: tuple[DocumentSource, ...] | None
    lanes: int

    @property
    def shards(self) -> list[ShardList]:
        """The shards of all sources."""
        return [source.shards for source in (*self.train, *(self.heldout or ()))]

    @property
    def fingerprint(self) -> str:
        """A checkpoint has the lists of the shards: see DocumentSource.resumed."""
        return f"documents of {', '.join(source.name for source in self.train)}"

    def __str__(self) -> str:
        shown = [
            f"{source.name}: {len(source.shards.names)} shard{'s' * (len(source.shards.names) > 1)}, "
            f"{source.shards.sizes.sum() / 1e6:.1f} MB"
            for source in self.train
        ]
        return f"documents of {'; '.join(shown)}"


def has_documents(config: DataConfig) -> bool:
    """Whether the settings name shards of documents, and not a corpus of text."""
    return bool(config.sources) or (not config.has_tokens and any(map(_is_of_shards, config.path)))


def _is_of_shards(path: str) -> bool:
    if kind_of(path) != "text" or is_compressed(path) or is_checksum_list(path) or "://" in path:
        return True
    return not os.path.exists(os.path.expanduser(path)) and ("{" in path or glob.has_magic(path))


def load_data(
    config: DataConfig, comm: Communicator, *, batch: int, context: int = 0
) -> Corpus | DocumentSources | TokenFiles:
    """Find the data on rank 0. Collective; ValueError on all ranks if they cannot be read.

    `batch`: rows of a global batch. `context`: tokens of a row. If the data are one row but the training side is not, nothing of text
    and tokens is held out.
    """
    if config.has_tokens:
        with comm.together():
            paths = list_shards(config.path).paths
            files = open_tokens(paths, config.heldout, config.field)
            return files if len(files.train) > context else open_tokens(paths, 0.0, config.field)
    if has_documents(config):
        return _find_documents(config, comm, batch)
    with comm.together():
        default = DataConfig()
        if wrong := [
            name
            for name in ("heldout_sources", "lanes", "packing", "tokenizer")
            if getattr(config, name) != getattr(default, name)
        ]:
            raise ConfigError(f"data.{wrong[0]}: only for documents, and data.path names text")
    return load_corpus(config, comm, context)


def load_corpus(config: DataConfig, comm: Communicator, context: int = 0) -> Corpus:
    """List the files on rank 0, read them on one rank of each node. Collective; ValueError on all ranks if that fails.

    If the ranks of a node cannot share memory, each of them reads the files for itself. OSError on all ranks if there is too little.
    """

    def listed() -> Listing:
        scanned = partial(scan, config.path, config.suffixes, follow_links=config.follow_links, field=config.field)
        listing = scanned(heldout=config.heldout)
        for remark in listing.remarks:
            say_remark(Remark(remark))
        return listing if listing.train.num_tokens > context else scanned(heldout=0.0)

    listing = on_rank0(comm, listed)

    def read(part: Part) -> np.ndarray:
        tokens: np.ndarray | None = None
        problem, fits = "", True
        try:
            tokens = comm.node.shared(part.num_tokens, np.uint8, or_anonymous=True)
        except OSError as error:  # on all ranks of the node
            problem = str(error)
            # Before one of them reads.
            fits = comm.node.broadcast_object(part.num_tokens * comm.node.size <= available_bytes())
        with comm.together():
            if not fits:
                raise OSError(
                    f"{problem}; and a copy of the data for each of {comm.node.size} ranks needs more memory than there is"
                )
            reads = tokens is None or comm.node.rank == 0
            if tokens is None:
                say_short(comm.node.rank, "each rank of this node has its own copy of the data", problem, _log)
                tokens = np.empty(part.num_tokens, np.uint8)
            if reads:
                read_into(part, tokens)
        return tokens

    num_files = len({piece.path for part in (listing.train, listing.heldout) for piece in part.pieces})
    return Corpus(read(listing.train), read(listing.heldout), num_files, listing.fingerprint)


def shard_cache(config: DataConfig, lists: Iterable[ShardList]) -> ShardCache:
    """The cache of this node for the shards of some lists."""
    lists = list(lists)
    checksums = {path: checksum for its in lists for path, checksum in its.checksums.items()}
    versions = {path: version for its in lists for path, version in its.versions.items()}
    return ShardCache(config.cache, limit_bytes=config.cache_bytes, checksums=checksums, versions=versions)


def say_what_stays(config: DataConfig, lists: Iterable[ShardList], *, speaks: bool) -> None:
    """Print a line about the cache of this node, if this is a batch job and shards of these lists go through the cache.

    Also if the user has named the folder: the line says how much is there, with the shards of earlier jobs. `speaks`: of one process of
    each node. No error: a job ends.
    """
    if (
        not speaks
        or not any(map(os.environ.get, _JOBS))
        or not any(needs_copy(path) for its in lists for path in its.paths)
    ):
        return
    if text := _about(cache_folder(config.cache), config.cache_bytes):
        say_remark(Remark(text))


def _about(folder: Path, limit_bytes: int) -> str:
    """The line about a folder of the cache; "" if nothing is there."""
    num_shards, num_bytes = 0, 0
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return ""
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another job makes room
                    its = entry.stat(follow_symlinks=False)
                    # Beside the shards there are locks, and what killed ranks have left.
                    num_shards += "." not in entry.name
                    num_bytes += its.st_size
    except OSError as error:
        if error.errno == errno.ENOENT:
            return ""
        return f"this batch job may leave shards in {folder} on {os.uname().nodename}: {error.strerror}"
    if not num_bytes:
        return ""
    return (
        f"this batch job leaves {folder} on {os.uname().nodename}: {num_shards:,} shard{'s' * (num_shards != 1)}, {num_bytes:,} bytes, "
        f"for later runs there (data.cache_bytes: at most {limit_bytes:,}); remove the folder if none needs them"
    )


def speed_up(
    tokenizer: Tokenizer | None,
    found: Corpus | DocumentSources | TokenFiles,
    config: DataConfig,
    comm: Communicator,
    *,
    seed: int,
) -> list[str]:
    """Let a tokenizer of documents encode with a faster engine: see engines.py. Collective. Returns lines for the user.

    ValueError or OSError on all ranks if the first documents cannot be read. `seed`: of the run; it chooses these documents.
    """
    if not (isinstance(found, DocumentSources) and isinstance(tokenizer, JsonTokenizer)):
        return []

    def texts() -> Iterator[bytes]:
        cache = shard_cache(config, found.shards)
        for source in found.train:
            _, shard, begin = source.sequence(seed)[0]
            opened = OpenShards(source.shards, cache.local, field=source.field)
            yield from first_texts(opened.cut(shard, begin, begin + source.chunk_bytes))

    return tokenizer.use_fast_engine(comm, texts)


def _find_documents(config: DataConfig, comm: Communicator, batch: int) -> DocumentSources:
    settings = config.document_sources
    lanes = config.lanes or batch

    def listed(sources: Sequence[SourceConfig]) -> list[ShardList]:
        return [list_shards(source.path) for source in sources]

    found = on_rank0(comm, lambda: (listed(settings), listed(config.heldout_sources)))
    train, heldout = (
        tuple(
            DocumentSource.new(each.name, shards, lanes=lanes, field=each.field)
            for each, shards in zip(its, theirs, strict=True)
        )
        for its, theirs in zip((settings, config.heldout_sources), found, strict=True)
    )
    return DocumentSources(train, heldout or None, lanes)
