"""The same documents in the format of each library."""

import io
import json
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

NUM_SHARDS = 8


def documents(mean_bytes: int, total_bytes: int) -> Iterator[bytes]:
    """Pieces of the source code of Python's standard library, in UTF-8, of half to one and a half times the mean size."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    rng, at, made = np.random.default_rng(0), 0, 0
    while made < total_bytes:
        size = int(rng.integers(mean_bytes // 2, mean_bytes * 3 // 2))
        if at + size > len(text):
            at = int(rng.integers(size))
        document = text[at : at + size].decode(errors="ignore").encode()
        at += size
        made += len(document)
        yield document


def dealt(mean_bytes: int, total_bytes: int) -> list[list[bytes]]:
    """These documents, dealt to the shards."""
    shards: list[list[bytes]] = [[] for _ in range(NUM_SHARDS)]
    for number, document in enumerate(documents(mean_bytes, total_bytes)):
        shards[number % NUM_SHARDS].append(document)
    return shards


def write_tar(path: Path, shard: list[bytes]) -> None:
    """A shard of WebDataset."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as file:
        for number, document in enumerate(shard):
            info = tarfile.TarInfo(f"{path.stem}-{number:08}.txt")
            info.size = len(document)
            file.addfile(info, io.BytesIO(document))


def write_jsonl(path: Path, shard: list[bytes]) -> None:
    """A file of JSON Lines."""
    path.write_text("".join(json.dumps({"text": document.decode()}) + "\n" for document in shard))


def write_parquet(path: Path, shard: list[bytes]) -> None:
    """A Parquet file with the row groups that pyarrow makes for 1 MiB of text each."""
    import pyarrow
    from pyarrow import parquet

    mean = sum(map(len, shard)) / len(shard)
    table = pyarrow.table({"text": [document.decode() for document in shard]})
    parquet.write_table(table, path, row_group_size=max(1, int((1 << 20) / mean)), compression="zstd")


def write_array_record(path: Path, shard: list[bytes]) -> None:
    """A file of ArrayRecord, the format of grain."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for document in shard:
        writer.write(document)
    writer.close()


def write_mds(folder: Path, shards: list[list[bytes]]) -> None:
    """The shards of MosaicML's streaming."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"text": "bytes"}, size_limit=16 << 20) as writer:
        for shard in shards:
            for document in shard:
                writer.write({"text": document})
