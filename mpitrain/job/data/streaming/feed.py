"""The documents of one source, chunk by chunk, as tokens."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collectives.texts import shown, without_secrets
from mpitrain.job.data.documents import Cut, DamagedSampleError, checked_text
from mpitrain.job.data.open_shards import OpenShards
from mpitrain.job.data.order import keys_of, permute
from mpitrain.job.data.remarks import Remark
from mpitrain.job.data.shards import ShardList
from mpitrain.job.data.streaming.chunks import ChunkSequence
from mpitrain.job.data.streaming.fetching import FetchAhead


class AllOnOtherSideError(ValueError):
    """All documents of a source, `num_documents`, are on the other side of data.heldout."""

    def __init__(self, text: str, num_documents: int) -> None:
        super().__init__(text)
        self.num_documents = num_documents


class Feed:
    """A source on this process.

    Args:
        name: of the source; it chooses the order.
        shards: all shards.
        sequence: the order of its chunks.
        encode: the tokens of a text in UTF-8, int32; they end with the separator.
        field: see `open_shard`.
        keeps: whether the document with this key is one of the source; None: all are.
        local: a block in which a shard, a path or URL of so many bytes, is an uncompressed file of this machine: see ShardCache.
        say: see OpenShards.
    """

    def __init__(
        self,
        name: str,
        shards: ShardList,
        sequence: ChunkSequence,
        encode: Callable[[bytes], np.ndarray],
        *,
        field: str | None = None,
        keeps: Callable[[bytes], bool] | None = None,
        local: Callable[[str, int], AbstractContextManager[Path]],
        say: Callable[[Remark], object] | None = None,
    ) -> None:
        self.name, self.shards, self.sequence, self.encode = name, shards, sequence, encode
        self._keeps, self._open = keeps, OpenShards(shards, local, field=field, say=say)

    def documents(self, chunk: int) -> "ChunkDocuments":
        """The documents of a chunk, permuted. DamagedShardError or OSError if the shard cannot be read."""
        _, shard, begin = self.sequence[chunk]
        cut = self._open.cut(shard, begin, begin + self.sequence.chunk_bytes)
        kept = None
        if self._keeps is not None:
            kept = np.fromiter((index for index in range(len(cut)) if self._keeps(cut.key(index))), np.int64)
        order = np.arange(num := len(cut) if kept is None else len(kept))
        if num > 1:
            order = permute(order, num, keys_of(self.sequence.seed, self.name, "documents", chunk))
        return ChunkDocuments(cut, order if kept is None else kept[order])

    def is_as_before(self, chunk: int) -> bool:
        """Whether readers of version 1 gave the same documents of a chunk. Errors: see `documents`."""
        _, shard, begin = self.sequence[chunk]
        return self._open.cut(shard, begin, begin + self.sequence.chunk_bytes).is_as_before()

    def shard_of(self, chunk: int) -> tuple[str, int]:
        """The path or URL of a chunk's shard, and its size in bytes."""
        shard = self.sequence[chunk].shard
        return self.shards.paths[shard], int(self.shards.sizes[shard])

    def check(self) -> None:
        """ValueError unless there is a document. It reads the chunks of an epoch up to the first one that has one."""
        num_all = 0
        for chunk in range(self.sequence.length(0)):
            documents = self.documents(chunk)
            if len(documents):
                return
            num_all += documents.num_all
        if not num_all:
            raise ValueError(
                f"data: {self.name} has no documents in {self.shards.folder}; expected shards with documents"
            )
        raise AllOnOtherSideError(
            f"data: {self.name} has {num_all} document{'s' * (num_all > 1)} in {self.shards.folder}, and none on this side of "
            "data.heldout; take more documents, another data.heldout, or --train.eval-batches 0",
            num_all,
        )


class ChunkDocuments:
    """The documents of a chunk, in the order in which they come."""

    def __init__(self, cut: Cut, order: np.ndarray) -> None:
        self._cut, self._order = cut, order.data  # of integers: NumPy's would take longer
        self.num_all = len(cut)
        """The documents of the chunk, those of the other side of a split included."""

    def __len__(self) -> int:
        return len(self._order)

    def text(self, index: int) -> bytes:
        """A document in UTF-8. DamagedSampleError if it cannot be read."""
        return checked_text(self._cut, self._order[index])


CHUNK, DOCUMENT, OFFSET, DAMAGED = range(4)
"""The integers of a lane's state in a source: the number of the chunk, of the document in it, a place in the document (see packing.py),
and the damaged documents so far."""

_MOST_IN_A_ROW = 1000  # damaged documents: then the source has none that can be read, or too few


class Tolerance(NamedTuple):
    """What happens to damaged documents: `say` gets a line about each. More than `most` end the run."""

    most: int = 0
    say: Callable[[str], object] = lambda line: None

    def check(self, num: int, last: str = "") -> None:
        """ValueError if so many damaged documents are too many. `last`: about one of them."""
        if num > self.most:
            raise ValueError(
                f"data: {num} damaged document{'s' * (num > 1)}; expected {self.most} at most; mend the shards, or leave out more with "
                f"--data.max-bad-samples{f': {last}' if last else ', stderr names them'}"
            )


def tell(damaged: str) -> None:
    """Print a line about a damaged document, on the rank that has found it."""
    print(f"data: left out: {shown(without_secrets(damaged))}", file=sys.stderr, flush=True)


class Cursor:
    """The place of a lane in a source. `state`: int64, see CHUNK; this changes it.

    Lane n of L takes the chunks n, n + L, n + 2 L, ...
    """

    def __init__(self, feed: Feed, state: np.ndarray, num_lanes: int, tolerance: Tolerance, ahead: FetchAhead) -> None:
        self._feed, self.state, self._num_lanes, self._tolerance, self._ahead = feed, state, num_lanes, tolerance, ahead
        ahead.fetch(*feed.shard_of(int(state[CHUNK])))
        self._documents: ChunkDocuments | None = None
        self._tokens: np.ndarray | None = None

    def tokens(self) -> np.ndarray:
        """The tokens of the document at the place, with the separator. Passes over damaged documents, and counts them.

        The source must have a document: see `Feed.check`. ValueError if this lane alone has more damaged ones than are tolerated.
        """
        if self._tokens is None:
            self._tokens = self._find()
        return self._tokens

    def go_to(self, state: np.ndarray) -> None:
        """Go to another place."""
        if state[CHUNK] != self.state[CHUNK]:
            self._documents = None
        self.state[:] = state
        self._tokens = None

    def next_document(self) -> None:
        """Go to the begin of the next document."""
        self.state[DOCUMENT] += 1
        self.state[OFFSET] = 0
        self._tokens = None

    def chunk_ends(self) -> bool:
        """Whether the place is after the last document of the current chunk."""
        return bool(self.state[DOCUMENT] >= len(self._of_chunk()))

    def _of_chunk(self) -> ChunkDocuments:
        if self._documents is None:
            chunk = int(self.state[CHUNK])
            self._documents = self._feed.documents(chunk)
            self._ahead.fetch(*self._feed.shard_of(chunk + self._num_lanes))
        return self._documents

    def _find(self) -> np.ndarray:
        num_damaged = 0
        while True:
            if self.chunk_ends():
                self.state[CHUNK] += self._num_lanes
                self.state[DOCUMENT] = self.state[OFFSET] = 0
                self._documents = None
                continue
            try:
                return self._feed.encode(self._of_chunk().text(int(self.state[DOCUMENT])))
            except DamagedSampleError as error:
                num_damaged += 1
                self.next_document()
                self.state[DAMAGED] += 1
                self._tolerance.say(str(error))
                self._tolerance.check(int(self.state[DAMAGED]), str(error))
                if num_damaged >= _MOST_IN_A_ROW:
                    raise ValueError(f"data: {num_damaged} damaged documents in a row; the last one: {error}") from None
