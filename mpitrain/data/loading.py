"""The data of a run: a corpus in the shared memory of a node, or sources of documents."""

import glob
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from collectives import Communicator
from mpitrain.config import ConfigError, DataConfig, SourceConfig
from mpitrain.data.corpus import Part, read_into, scan
from mpitrain.data.documents import is_compressed, kind_of
from mpitrain.data.shards import ShardList, expanded, list_shards
from mpitrain.data.streaming.sources import Source
from mpitrain.data.tokens import TokenFiles, open_tokens
from mpitrain.rank0 import on_rank0


class Corpus(NamedTuple):
    """Tokens are bytes: 1-D uint8, shared by the ranks of a node, which must not write to them."""

    train: np.ndarray
    heldout: np.ndarray
    num_files: int
    fingerprint: str  # hash of names, sizes and split

    def __str__(self) -> str:
        sizes = len(self.train) / 1e6, len(self.heldout) / 1e6
        return f"{self.num_files} files, {sizes[0]:.1f} MB to train on, {sizes[1]:.2f} MB held out"


class Documents(NamedTuple):
    """Sources of documents. `heldout`: the sources of evaluation; None: a share of the training documents."""

    train: tuple[Source, ...]
    heldout: tuple[Source, ...] | None
    lanes: int

    @property
    def fingerprint(self) -> str:
        """A checkpoint has the lists of the shards: see Source.resumed."""
        return f"documents of {', '.join(source.name for source in self.train)}"

    def __str__(self) -> str:
        shown = [
            f"{source.name}: {len(source.shards.names)} shard{'s' * (len(source.shards.names) > 1)}, "
            f"{source.shards.sizes.sum() / 1e6:.1f} MB"
            for source in self.train
        ]
        return f"documents in {self.lanes} lane{'s' * (self.lanes > 1)}; {'; '.join(shown)}"


def has_documents(config: DataConfig) -> bool:
    """Whether the settings name shards of documents, and not a corpus of text."""
    return bool(config.sources) or (not config.has_tokens and any(map(_is_of_shards, config.path)))


def _is_of_shards(path: str) -> bool:
    if kind_of(path) != "text" or is_compressed(path) or "://" in path:
        return True
    return not os.path.exists(os.path.expanduser(path)) and ("{" in path or glob.has_magic(path))


def load_data(config: DataConfig, comm: Communicator, *, batch: int) -> Corpus | Documents | TokenFiles:
    """Find the data on rank 0. Collective; ValueError on all ranks if they cannot be read. `batch`: rows of a global batch."""
    if config.has_tokens:
        with comm.together():
            names = [name for path in config.path for name in _names(path)]
            return open_tokens(names, config.heldout, config.field)
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
    return load_corpus(config, comm)


def load_corpus(config: DataConfig, comm: Communicator) -> Corpus:
    """List the files on rank 0, read them on one rank of each node. Collective; ValueError on all ranks if that fails."""
    listing = on_rank0(comm, lambda: scan(config.path, config.suffixes, config.heldout))

    def read(part: Part) -> np.ndarray:
        tokens = comm.node.shared(part.num_tokens, np.uint8)
        with comm.together():
            if comm.node.rank == 0:
                read_into(part, tokens)
        return tokens

    num_files = len({piece.path for part in (listing.train, listing.heldout) for piece in part.pieces})
    return Corpus(read(listing.train), read(listing.heldout), num_files, listing.fingerprint)


def _find_documents(config: DataConfig, comm: Communicator, batch: int) -> Documents:
    settings = config.sources or (SourceConfig("data", config.path, field=config.field),)
    lanes = config.lanes or batch

    def listed(sources: Sequence[SourceConfig]) -> list[ShardList]:
        return [list_shards(source.path) for source in sources]

    found = on_rank0(comm, lambda: (listed(settings), listed(config.heldout_sources)))
    train, heldout = (
        tuple(
            Source.new(each.name, shards, lanes=lanes, field=each.field)
            for each, shards in zip(its, theirs, strict=True)
        )
        for its, theirs in zip((settings, config.heldout_sources), found, strict=True)
    )
    return Documents(train, heldout or None, lanes)


def _names(pattern: str) -> list[str]:
    """The files of a pattern with globs and braces, in order. ValueError if there are none."""
    names = [
        found for name in expanded(pattern) for found in (sorted(glob.glob(name)) if glob.has_magic(name) else [name])
    ]
    if not names:
        raise ValueError(f"data.path: {pattern} names no file")
    return names
