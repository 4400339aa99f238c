"""The settings of the section [data]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mpitrain.job.config.errors import ConfigError, expect


@dataclass(frozen=True)
class SourceConfig:
    """A source of documents: one table [[data.sources]] of a TOML file."""

    name: str
    """The name, which chooses the order of the documents: with the same name the order stays."""
    path: tuple[str, ...]
    """Shards: names, globs, brace ranges such as part-{000..127}.tar, or URLs."""
    weight: float = 1.0
    """The source's share of the rows, relative to the weights of the others."""
    weights: tuple[tuple[float, float], ...] = ()
    """Instead of `weight`: [step, weight] in order; between two steps the weight changes linearly."""
    field: str | None = None
    """The field of a JSON line, the column of a Parquet file, or the part of a sample in a tar file that is the text (default: text,
    or txt in a tar file)."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or not self.path or "" in self.path:
            raise ConfigError(f"data.sources: expected a name without / and paths that are not empty, got {self}")
        steps = [step for step, _ in self.weights]
        if steps != sorted(set(steps)) or not all(math.isfinite(value) for pair in self.weights for value in pair):
            raise ConfigError(f"data.sources: expected weights with growing steps, got {self.weights} for {self.name}")
        if not (math.isfinite(self.weight) and self.weight >= 0) or any(weight < 0 for _, weight in self.weights):
            raise ConfigError(f"data.sources: expected weights of at least 0, got {self}")

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """The weight at some steps."""
        return self.weights or ((0, self.weight),)


_OF_TOKENS = (".bin", ".npy", ".h5", ".hdf5")


@dataclass(frozen=True)
class DataConfig:
    """The training data: text, or shards of documents."""

    path: tuple[str, ...] = ()
    """Files and folders with the training text; shards of documents (.tar, .jsonl, .parquet) as names, globs, brace ranges such as
    part-{000..127}.tar, URLs, or lists with checksums (.sha256, .md5); or files of tokens (.bin, .npy, .h5). Default: the source files
    of Python's standard library."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources of documents with weights, instead of data.path: tables [[data.sources]] of a TOML file."""
    heldout_sources: tuple[SourceConfig, ...] = ()
    """Documents for evaluation: tables [[data.heldout_sources]]. Default: a share of the documents (data.heldout)."""
    suffixes: tuple[str, ...] = ()
    """The endings of the files that are read in a folder, such as .py .md; default: every file that looks like text."""
    follow_links: bool = False
    """Of text in folders: files may be links that lead out of the folder of data.path. Else such a link is an error, unless it leads to
    the blobs of the snapshot of a Hugging Face repository."""
    heldout: float = 0.05
    """Share of the data kept for evaluation. Of documents: those with keys of which a hash is below this share."""
    field: str | None = None
    """Of documents in data.path: see data.sources."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json of Hugging Face's library tokenizers, for documents and for files of tokens."""
    separator: str | None = None
    """The token of that tokenizer that follows each document (default: one of those that usually end a text, such as <|endoftext|>)."""
    lanes: int | None = None
    """Of documents: the number of parts in which they are read at the same time, a divisor of train.batch; fixed for a run (default:
    train.batch)."""
    packing: Literal["cut", "whole"] = "cut"
    """Of documents: cut fills rows with documents end to end; whole keeps documents whole that fit into a row, and pads rows."""
    mask_documents: bool = True
    """Of documents: a token attends to earlier tokens of its own document alone, and positions begin at 0 with each document. Else
    attention and positions go over the whole row."""
    processes: int = 1
    """Of documents: the processes of each rank that read and tokenize ahead of the training; 0: the rank itself, between the steps."""
    cache: str | None = None
    """Folder on a disk of each node for shards that are remote or compressed (default: a folder in $TMPDIR, else /tmp)."""
    cache_bytes: int = 64 << 30
    """The bytes that the shards in this folder may take; those that were not used for the longest time are removed."""
    max_bad_samples: int = 0
    """Of documents: how many damaged documents the run passes over, counted again in each epoch; one more ends it."""

    def __post_init__(self) -> None:
        expect("data.heldout", self.heldout, 0, below=1)
        expect("data.lanes", self.lanes, 1)
        expect("data.processes", self.processes, 0)
        expect("data.max_bad_samples", self.max_bad_samples, 0)
        expect("data.cache_bytes", self.cache_bytes, 1)
        if "" in self.path or "" in self.suffixes:
            raise ConfigError("data.path and data.suffixes: expected values that are not empty")
        if not self.tokenizer:
            raise ConfigError("data.tokenizer: expected bytes or the path of a tokenizer.json")
        tokens = [path for path in self.path if path.endswith(_OF_TOKENS)]
        if tokens and len(tokens) < len(self.path):
            raise ConfigError(f"data.path: expected files of tokens alone, or none, got {tokens[0]} with others")
        if self.path and self.sources:
            raise ConfigError("data.path and data.sources: expected one of them, got both")
        for sources in (self.sources, self.heldout_sources):
            if len({source.name for source in sources}) < len(sources):
                raise ConfigError(f"data.sources: expected different names, got {[source.name for source in sources]}")
            tokens = [path for source in sources for path in source.path if path.endswith(_OF_TOKENS)]
            if tokens:
                raise ConfigError(
                    f"data.sources: expected documents, got files of tokens ({tokens[0]}); name them in data.path"
                )

    @property
    def document_sources(self) -> tuple[SourceConfig, ...]:
        """The sources of documents: data.sources, or the shards of data.path as one source."""
        return self.sources or (SourceConfig("data", self.path, field=self.field),)

    @property
    def has_tokens(self) -> bool:
        """Whether data.path names files of tokens."""
        return bool(self.path) and all(path.endswith(_OF_TOKENS) for path in self.path)
