"""The shards of a source that a process has open."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from mpitrain.job.data.documents import (
    Cut,
    DamagedSampleError,
    Kind,
    Reader,
    checked_text,
    is_compressed,
    kind_of,
    open_shard,
)
from mpitrain.job.data.remarks import Remark
from mpitrain.job.data.shards import ShardList

_NUM_OPEN = 64
_NO_END = 1 << 62
_SAMPLE_BYTES = 64 << 10


class OpenShards:
    """Opens shards when they are needed, and closes those that were not used for the longest time.

    Args:
        shards: all shards of the source.
        local: a block in which a shard, a path or URL of so many bytes, is an uncompressed file of this machine: see ShardCache.
        field: see `open_shard`.
        kind: of all shards; None: the names tell it.
        say: gets a remark about the first shard of which users should know something: see Reader.remark.
    """

    def __init__(
        self,
        shards: ShardList,
        local: Callable[[str, int], AbstractContextManager[Path]],
        *,
        field: str | None = None,
        kind: Kind | None = None,
        say: Callable[[Remark], object] | None = None,
    ) -> None:
        self._shards, self._local, self._field, self._kind, self._say = shards, local, field, kind, say
        self._open: OrderedDict[int, Reader] = OrderedDict()

    def cut(self, shard: int, begin: int, end: int) -> Cut:
        """The documents that begin at the bytes `begin` to `end - 1` of a shard; those of a compressed shard are one part.

        DamagedShardError or OSError if the shard cannot be read.
        """
        if self._kind is None and is_compressed(self._shards.paths[shard]):
            begin, end = (_NO_END if begin else 0), _NO_END
        reader = self._reader(shard)
        if reader.remark and self._say is not None:
            further = " (further shards are not named)" * (len(self._shards.names) > 1)
            self._say(Remark(f"{reader.remark}{further}", self._shards.token))
            self._say = None
        return reader.cut(begin, end)

    def _reader(self, shard: int) -> Reader:
        if shard not in self._open:
            name = self._shards.names[shard]
            with self._local(self._shards.paths[shard], int(self._shards.sizes[shard])) as path:
                self._open[shard] = open_shard(
                    path, name, self._kind or kind_of(self._shards.paths[shard]), self._field
                )
            while len(self._open) > _NUM_OPEN:
                self._open.popitem(last=False)  # its map stays while somebody reads it
        self._open.move_to_end(shard)
        return self._open[shard]


def first_texts(cut: Cut) -> list[bytes]:
    """The first documents of a part that can be read, of 64 KiB or more together: to compare tokenizers, which takes 15 ms."""
    texts: list[bytes] = []
    for index in range(len(cut)):
        if sum(map(len, texts)) >= _SAMPLE_BYTES:
            break
        try:
            texts.append(checked_text(cut, index))
        except DamagedSampleError:
            continue
    return texts
