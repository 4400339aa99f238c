"""A checkpoint of an earlier version, whose readers have read some shards otherwise: see documents.VERSION.

A place in a chunk means the same documents only if the chunk has the same ones. What such a run has not begun, it reads as all runs do.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpitrain.job.data.documents import VERSION, has_kind_as_before, kind_of
from mpitrain.job.data.streaming.feed import CHUNK, DOCUMENT, OFFSET
from mpitrain.job.data.streaming.lanes import Recipe
from mpitrain.job.data.streaming.sources import DocumentSource

KEY = "data.reader"
"""Of the version in a checkpoint."""

_REMEDY = (
    "the run was saved by an earlier version: its place in the documents would be another; start another run with --run, and --resume "
    "CHECKPOINT for its weights and optimizer: it reads the documents from the beginning"
)


def is_earlier(version: Any) -> bool:
    """Whether a version of a checkpoint is 1. ValueError if this code does not know it."""
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(
            f"data: the run was saved with version {version!s:.20} of the readers of documents, and this program has {VERSION}; take a "
            "program that is as new"
        )
    return version < VERSION


def check_kinds(source: DocumentSource, before: Sequence[str]) -> None:
    """ValueError if the names in a checkpoint, `before`, stand for other kinds of shards than those of `source`."""
    for name, now, path in zip(before, source.shards.names, source.shards.paths, strict=False):
        if not has_kind_as_before(path, name):
            raise ValueError(f"data: {now} of {source.name} is read as {_SAID[kind_of(path)]}, and was not; {_REMEDY}")


def check_places(recipe: Recipe, lanes: np.ndarray, numbers: Iterable[int]) -> None:
    """ValueError if the chunk in which one of the lanes with these `numbers` stands has other documents now.

    `lanes`: the states of all lanes. DamagedShardError or OSError if a shard cannot be read.
    """
    feeds, checked = recipe.feeds(), set[tuple[int, int]]()
    for lane in numbers:
        for index, (feed, state) in enumerate(zip(feeds, lanes[lane].tolist(), strict=True)):
            chunk = state[CHUNK]
            if not (state[DOCUMENT] or state[OFFSET]) or (index, chunk) in checked:
                continue
            checked.add((index, chunk))
            if not feed.is_as_before(chunk):
                name = feed.shards.names[feed.sequence[chunk].shard]
                raise ValueError(
                    f"data: {name} of {feed.name} has {_OTHERWISE[kind_of(feed.shard_of(chunk)[0])]}; {_REMEDY}"
                )


def remarks(sources: Iterable[DocumentSource], *, has_other_keys: bool) -> list[str]:
    """Lines for the user: what the run reads otherwise from now on.

    `has_other_keys`: names of shards had secrets, which are hidden now, and the keys of documents have these names.
    """
    kinds = {kind_of(path) for source in sources for path in source.shards.paths}
    its = " and ".join(_FROM_NOW_ON[kind] for kind in ("lines", "tar") if kind in kinds)
    lines = [f"the run was saved by an earlier version: from now on {its}"] if its else []
    if has_other_keys:
        lines.append("the names of its shards had secrets: other documents are held out from now on (data.heldout)")
    return lines


_SAID = {"lines": "JSON Lines", "tar": "a tar file", "parquet": "a Parquet file", "text": "text"}
_OTHERWISE = {
    "lines": "blank lines, byte-order marks or NaN, which it took as damaged documents",
    "tar": "links, sparse files or hidden files, which it has read otherwise",
}
_FROM_NOW_ON = {
    "lines": "blank lines, byte-order marks and NaN of JSON Lines are no damage",
    "tar": "links and sparse files of tar files are read, and their hidden files are not",
}
