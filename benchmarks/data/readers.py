"""Libraries that read documents: each reads all of them once, in order or shuffled, in this process."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.data import samples
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.documents import checked_text
from mpitrain.job.data.open_shards import OpenShards
from mpitrain.job.data.shards import list_shards
from mpitrain.job.data.streaming.lanes import Recipe
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.tokenizers import Bytes

_SEED = 1
_SHUFFLED = 1000  # samples in webdataset's buffer, its usual number


class Reader(NamedTuple):
    """A library with a format. `write`: makes the files; `read(folder, shuffled)`: the documents."""

    needs: tuple[str, ...]
    write: Callable[[Path, list[list[bytes]]], None]
    read: Callable[[Path, bool], Iterator[bytes]]

    @property
    def lacks(self) -> list[str]:
        """The libraries that it needs, and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


def _each(write: Callable[[Path, list[bytes]], None], suffix: str) -> Callable[[Path, list[list[bytes]]], None]:
    def written(folder: Path, shards: list[list[bytes]]) -> None:
        for number, shard in enumerate(shards):
            write(folder / f"{number:03}.{suffix}", shard)

    return written


def _ours(folder: Path, shuffled: bool) -> Iterator[bytes]:
    """The checked text of documents: shard by shard, or as a run with one lane gets it."""
    source, cache = DocumentSource.new("documents", list_shards([f"{folder}/*"]), lanes=1), ShardCache()
    if shuffled:
        (feed,) = Recipe((source,), (((0, 1.0),),), 1, 1, 1, _SEED, "cut", cache, Bytes()).feeds()
        for chunk in range(feed.sequence.length(0)):
            documents = feed.documents(chunk)
            yield from map(documents.text, range(len(documents)))
        return
    shards = OpenShards(source.shards, cache.local)
    for shard, size in enumerate(source.shards.sizes.tolist()):
        cut = shards.cut(shard, 0, size)
        yield from map(partial(checked_text, cut), range(len(cut)))


def _webdataset(folder: Path, shuffled: bool) -> Iterator[bytes]:
    from webdataset import WebDataset

    files = sorted(map(str, folder.iterdir()))
    found = WebDataset(files, shardshuffle=len(files) if shuffled else False, empty_check=False, seed=_SEED)
    for sample in found.shuffle(_SHUFFLED) if shuffled else found:
        yield sample["txt"]


def _grain(folder: Path, shuffled: bool) -> Iterator[bytes]:
    import grain

    found = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(sorted(map(str, folder.iterdir()))))
    yield from found.shuffle(seed=_SEED) if shuffled else found


def _streaming(folder: Path, shuffled: bool) -> Iterator[bytes]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    found = StreamingDataset(local=str(folder), shuffle=shuffled, shuffle_seed=_SEED, batch_size=1)
    for sample in found:
        yield sample["text"]


READERS = {
    "mpitrain tar": Reader((), _each(samples.write_tar, "tar"), _ours),
    "webdataset tar": Reader(("webdataset",), _each(samples.write_tar, "tar"), _webdataset),
    "mpitrain jsonl": Reader((), _each(samples.write_jsonl, "jsonl"), _ours),
    "mpitrain parquet": Reader(("pyarrow",), _each(samples.write_parquet, "parquet"), _ours),
    "grain arrayrecord": Reader(("grain", "array_record"), _each(samples.write_array_record, "arrayrecord"), _grain),
    "streaming mds": Reader(("streaming",), samples.write_mds, _streaming),
}
