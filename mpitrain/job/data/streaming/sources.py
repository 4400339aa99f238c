"""The sources of a run: their shards, and what a checkpoint keeps of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitrain.job.data.documents import is_compressed
from mpitrain.job.data.shard_names import FoundShards, Known, found_again, shard_marks, shard_names
from mpitrain.job.data.shards import ShardList, in_their_folder
from mpitrain.job.data.streaming.chunks import ChunkSequence, Era, num_chunks

_MOST_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 4 << 20, 4 << 10
_MANY_CHUNKS = 1 << 20  # but a run may have more if they are not small
_MOST_SHOWN = 10  # shards in a line
_CHUNKS_PER_LANE = 16  # in an epoch, as far as the limits of a chunk allow: else lanes are in several epochs at a time


@dataclass(frozen=True)
class DocumentSource:
    """A source: its shards, and the order of their chunks.

    `eras`: (first epoch, number of shards): a source whose list became longer has several. The shards of an era are the first ones.
    """

    name: str
    shards: ShardList
    chunk_bytes: int
    eras: tuple[tuple[int, int], ...]
    field: str | None = None

    @staticmethod
    def new(name: str, shards: ShardList, *, lanes: int, field: str | None = None) -> "DocumentSource":
        """A source at the begin of a run."""
        wanted = int(shards.sizes.sum()) // (lanes * _CHUNKS_PER_LANE)
        chunk_bytes = min(max(wanted, _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
        return DocumentSource(name, shards, chunk_bytes, ((0, len(shards.names)),), field)

    def resumed(
        self,
        saved: Mapping[str, Any],
        names: Sequence[str],
        sizes: np.ndarray,
        furthest: int,
        *,
        marks: Sequence[str] = (),
        listed: Sequence[str] = (),
        say: Callable[[str], object] = lambda line: None,
    ) -> "DocumentSource":
        """This source with the order of a checkpoint. New shards come from the epoch on that follows all of which a lane has begun.

        `saved`: of `meta`. `names`, `sizes`, `marks`: the shards of the checkpoint, in its order; without `marks` they are not known.
        `listed`: see ShardList. `furthest`: the greatest chunk of a lane. `say`: gets a line about shards that are found by name and
        size alone.
        ValueError if a shard of the checkpoint is missing, or has another size.
        """
        eras = tuple((int(first), int(count)) for first, count in saved["eras"])
        chunk_bytes = int(saved["chunk_bytes"])
        if (total := int(sizes.sum())) // chunk_bytes > max(total // _LEAST_CHUNK_BYTES, _MANY_CHUNKS):
            raise ValueError(
                f"data: the checkpoint has chunks of {chunk_bytes} bytes for {total}; no run makes so many"
            )
        now, marks = self.shards.known, tuple(marks) or ("",) * len(names)
        is_same = (tuple(names), tuple(marks)) == (self.shards.names, tuple(now.marks)) and sizes.tolist() == now.sizes
        if is_same and not listed:
            return replace(self, chunk_bytes=chunk_bytes, eras=eras)  # the usual case
        folder, known = _public(saved["folder"], Known(listed or names, sizes.tolist(), marks))
        names = names if listed else known.names
        known, found = _found_in(self.shards, folder, known)
        places = found.places
        for name, size, place in zip(known.names, known.sizes, places, strict=True):
            if place < 0 or now.sizes[place] != size:
                is_there = "it is not there" if place < 0 else f"it has {now.sizes[place]} bytes now, and had {size}"
                raise ValueError(
                    f"data: the run has read {name} of {self.name} in {self.shards.folder}, and {is_there}; put it back, or start "
                    "another run with --run"
                )
        if found.unsure:
            say(_unsure(self.name, [known.names[index] for index in found.unsure]))
        places_before = set(places)
        further = [index for index in range(len(now.names)) if index not in places_before]
        order = places + further
        in_list = tuple(self.shards.names[index] for index in order)
        keys = (*names, *in_list[len(names) :])  # the keys of documents have the names
        shards = self.shards._replace(
            names=keys,
            listed=in_list if in_list != keys else (),
            paths=tuple(self.shards.paths[index] for index in order),
            sizes=self.shards.sizes[order],
            marks=tuple(now.marks[index] for index in order),
        )
        before = replace(self, shards=shards, chunk_bytes=chunk_bytes, eras=eras)
        if not further:
            return before
        return replace(before, eras=(*eras, (before.sequence(0).epoch_of(furthest) + 1, len(order))))

    def renamed(self, names: Mapping[tuple[str, str], str]) -> "DocumentSource":
        """This source with these names of some shards, by the names of sources and paths."""
        its = zip(self.shards.paths, self.shards.names, strict=True)
        now = tuple(names.get((self.name, path), name) for path, name in its) if names else self.shards.names
        return self if now == self.shards.names else replace(self, shards=self.shards._replace(names=now))

    def meta(self) -> dict[str, Any]:
        """What a checkpoint keeps, besides the list of the shards."""
        eras = [list(era) for era in self.eras]
        return {
            "name": self.name, "folder": self.shards.folder, "field": self.field, "chunk_bytes": self.chunk_bytes, "eras": eras
        }  # fmt: skip

    def sequence(self, seed: int) -> ChunkSequence:
        """The order of the chunks."""
        splits = np.array([not is_compressed(path) for path in self.shards.paths])
        counts = num_chunks(self.shards.sizes, splits, self.chunk_bytes)
        eras = [Era(first, counts[:num]) for first, num in self.eras]
        return ChunkSequence(eras, seed=seed, source=self.name, chunk_bytes=self.chunk_bytes)


def _public(folder: str, before: Known) -> tuple[str, Known]:
    """The folder and shards of a checkpoint, as `list_shards` gives them: earlier versions kept addresses with their secrets."""
    paths = [f"{folder}/{name}" if folder else name for name in before.names]
    public = shard_names(paths, before.sizes)
    if public == paths:
        return folder, before
    folder, names = in_their_folder(public)
    return folder, Known(names, before.sizes, shard_marks(paths, public))


def _found_in(shards: ShardList, folder: str, before: Known) -> tuple[Known, FoundShards]:
    """The shards of a checkpoint, which were in `folder`, with their names in a list, and their places."""
    found = found_again(before, shards.known)
    base = f"{shards.folder}/" if shards.folder else ""
    if folder == shards.folder or not folder.startswith(base):
        return before, found
    # A further folder of shards makes the folder of all of them shorter; or they have moved to it.
    inside = before._replace(names=[f"{folder[len(base) :]}/{name}" for name in before.names])
    found_inside = found_again(inside, shards.known)
    return (before, found) if -1 in found_inside.places and -1 not in found.places else (inside, found_inside)


def _unsure(source: str, names: Sequence[str]) -> str:
    """A line about shards that are found by name and size alone."""
    num, shown = len(names), ", ".join(names[:_MOST_SHOWN])
    its = f"{shown} and {num - _MOST_SHOWN} more" if num > _MOST_SHOWN else shown
    are = f"{num} shards of {source} are" if num > 1 else f"1 shard of {source} is"
    return (
        f"{are} known by name and size alone: {its}; hidden parameters of the addresses have changed, or the checkpoint does not have "
        "them. If the files are others, start another run with --run"
    )
