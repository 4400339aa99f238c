"""Runs whose checkpoints are of an earlier version, which has read some shards otherwise: they go on at their place, or not at all."""

import io
import json
import random
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.documents import has_kind_as_before, kind_of, open_shard
from mpitrain.job.data.shards import ShardList, list_shards
from mpitrain.job.data.streaming import earlier
from mpitrain.job.data.streaming.batches import DocumentBatches
from mpitrain.job.data.streaming.lanes import Recipe, open_lanes
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.tokenizers import Bytes

TEXTS = [f"document {number} " * (number % 5 + 2) for number in range(60)]
LINES = [json.dumps({"text": text}).encode() for text in TEXTS]
MARK = b"\xef\xbb\xbf"


def tar(*others: tuple[str, dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data, fields in [
            *((f"{number:03}.txt", text.encode(), {}) for number, text in enumerate(TEXTS)),
            *((name, b"", fields) for name, fields in others),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def sparse(name: str) -> tuple[str, dict[str, Any]]:
    records = {"map": "", "size": "30", "numblocks": "0", "name": name}
    return "x.txt", {"pax_headers": {f"GNU.sparse.{key}": value for key, value in records.items()}}


def batches(folder: Path, pattern: str, **changed: Any) -> DocumentBatches:
    source = DocumentSource.new("a", list_shards([f"{folder}/{pattern}"]), lanes=2)
    settings: dict[str, Any] = {"context": 24, "seed": 1, "packing": "cut", "tokenizer": Bytes(), "share": (0.1, 1.0)}
    recipe = Recipe((source,), (((0, 1.0),),), 2, 4, cache=ShardCache(), **(settings | changed))
    return DocumentBatches(recipe, partial(open_lanes, say=print))


def resumed(run: DocumentBatches, again: DocumentBatches, step: int, version: int | None = None) -> list[str]:
    """Let `again` go on where `run` is, as if an earlier version had saved it."""
    meta, tensors = run.described()
    del meta["order"][earlier.KEY]
    meta["order"] |= {} if version is None else {earlier.KEY: version}
    again.shapes(meta)
    again.go_on(step, run.next_sample(step))
    return again.load(run.next_sample(step), meta, {**tensors, "lanes": run.states(step, range(run.batch))[1]})


SAME: dict[str, bytes] = {
    "a.jsonl": b"\n".join(LINES),
    "windows.jsonl": b"\r\n".join([*LINES, b""]),
    "gaps.ndjson": b"\n\n".join([*LINES, b"", b""]),
    "damaged.jsonl": b"\n".join([b"[]", b"x", b'{"text": 5}', *LINES]),
    "a.txt": "\n".join(TEXTS).encode(),
    "a.tar": tar(("folder", {"type": tarfile.DIRTYPE}), ("link", {"type": tarfile.SYMTYPE, "linkname": "folder"})),
}
OTHER: dict[str, tuple[bytes, str]] = {
    "a.json": (SAME["a.jsonl"], "a.json of a is read as JSON Lines, and was not"),
    "a.jsonlines": (SAME["a.jsonl"], "a.jsonlines of a is read as JSON Lines, and was not"),
    "a.JSONL": (SAME["a.jsonl"], "a.JSONL of a is read as JSON Lines, and was not"),
    "a.TAR": (SAME["a.tar"], "a.TAR of a is read as a tar file, and was not"),
    "b.jsonl": (b"\r\n\r\n".join(LINES), "b.jsonl of a has blank lines, byte-order marks or NaN, which it took as damaged"),
    "c.jsonl": (b"\n".join([*LINES, b" "]), "c.jsonl of a has blank lines"),
    "d.jsonl": (MARK + b"\n".join(LINES), "d.jsonl of a has blank lines, byte-order marks"),
    "e.jsonl": (b"\n".join([*LINES[:-1], b'{"x": NaN, "text": ""}']), "e.jsonl of a has blank lines, byte-order marks or NaN"),
    "b.tar": (tar((".hidden.txt", {})), "b.tar of a has links, sparse files or hidden files, which it has read otherwise"),
    "c.tar": (tar(("l.txt", {"type": tarfile.LNKTYPE, "linkname": "000.txt"})), "c.tar of a has links"),
    "d.tar": (tar(("s.txt", {"type": tarfile.SYMTYPE, "linkname": "000.txt"})), "d.tar of a has links"),
    "e.tar": (tar(sparse("e.txt")), "e.tar of a has links, sparse files"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_shards_that_are_read_as_before(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(SAME[name])
    plain, run, again = (batches(tmp_path, name[:-1] + "?", max_damaged=99) for _ in range(3))
    expected = [plain.get(step, range(4)).tokens for step in range(8)]
    for step in range(4):
        run.get(step, range(4))
    remarks = resumed(run, again, 4)
    assert len(remarks) == (kind_of(name) != "text")
    assert all(np.array_equal(again.get(step, range(4)).tokens, expected[step]) for step in range(4, 8))
    assert again.described()[0]["order"][earlier.KEY] == 2


@pytest.mark.parametrize("name", OTHER)
def test_shards_that_are_read_otherwise(tmp_path: Path, name: str) -> None:
    data, text = OTHER[name]
    (tmp_path / name).write_bytes(data)
    run, step = batches(tmp_path, name[:-1] + "?", context=700), 0

    def go_on_after_each_step() -> None:
        nonlocal step
        for step in range(1, 64):  # until a lane is where the difference is
            run.get(step - 1, range(4))
            resumed(run, batches(tmp_path, name[:-1] + "?", context=700), step)

    with pytest.raises(ValueError, match=text) as raised:
        go_on_after_each_step()
    assert "start another run with --run, and --resume CHECKPOINT for its weights" in str(raised.value)
    assert resumed(run, batches(tmp_path, name[:-1] + "?", context=700), step, version=2) == []


def read_by_version_1(data: bytes, begin: int, end: int) -> list[tuple[bytes, list[bytes]]]:
    """The samples of a part of a tar file: hidden files were samples as others, and links were none."""
    found: list[tuple[int, bytes, list[bytes]]] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive.getmembers():
            if not member.isreg():
                continue
            folder, slash, name = member.name.rpartition("/")
            key, file = f"{folder}{slash}{name.partition('.')[0]}".encode(), archive.extractfile(member)
            assert file is not None
            if not found or found[-1][1] != key:
                found.append((member.offset, key, []))
            found[-1][2].append(file.read())
    return [(key, texts) for at, key, texts in found if begin <= at < end]


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_tar_files_that_are_read_as_before(tmp_path: Path, seed: int) -> None:
    draws, file, num_same = random.Random(seed), io.BytesIO(), 0
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(40):
            names = [f"{number:03}.{part}" for part in draws.sample("abc", draws.randint(1, 3))]
            kinds = [tarfile.SYMTYPE if number and draws.random() < 0.05 else tarfile.REGTYPE for _ in names]
            if draws.random() < 0.1:
                at = draws.randint(0, len(names))
                names.insert(at, f".{number}.hidden")
                kinds.insert(at, tarfile.REGTYPE)
            for name, kind in zip(names, kinds, strict=True):
                info, text = tarfile.TarInfo(name), f"{name} " * draws.randint(1, 90)
                info.type, info.size, info.linkname = kind, len(text) * (kind == tarfile.REGTYPE), "000.z"
                archive.addfile(info, io.BytesIO(text.encode()))
        archive.addfile(tarfile.TarInfo("zzz.z"))
    (tmp_path / "a.tar").write_bytes(data := file.getvalue())
    reader = open_shard(tmp_path / "a.tar", "a.tar", "tar")
    for _ in range(60):
        begin = draws.randrange(0, len(data), 512)
        end = begin + 512 * draws.randint(1, 16)
        cut = reader.cut(begin, end)
        if cut.is_as_before():
            expected, num_same = read_by_version_1(data, begin, end), num_same + bool(len(cut))
            assert [(cut.key(index), list(cut.parts(index).values())) for index in range(len(cut))] == expected  # type: ignore[attr-defined]
    assert num_same >= 5 and not reader.cut(0, len(data)).is_as_before()


def test_a_hidden_file_far_ahead_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar((".hidden.txt", {})))
    run = batches(tmp_path, "a.ta?")
    run.get(0, range(4))
    assert len(resumed(run, batches(tmp_path, "a.ta?"), 1)) == 1


def test_a_chunk_that_no_lane_has_begun_may_have_changed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES))
    (tmp_path / "b.jsonl").write_bytes(MARK + b"\n".join(LINES))
    run = batches(tmp_path, "*.jsonl")
    (remark,) = resumed(run, batches(tmp_path, "*.jsonl"), 0)
    assert remark.startswith("the run was saved by an earlier version: from now on blank lines, byte-order marks")


@pytest.mark.parametrize("version", [3, 0, "2", None, True, 1.0])
def test_versions_that_are_not_known(tmp_path: Path, version: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES))
    run = batches(tmp_path, "*.jsonl")
    meta, _ = run.described()
    meta["order"][earlier.KEY] = version
    with pytest.raises(
        ValueError, match=r"saved with version .* of the readers of documents, and this program has 2; "
    ):
        run.shapes(meta)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("a.jsonl?sig=secret", "https://h/a.jsonl?sig=1"),  # as text
        ("a.tar?sig=secret", "https://h/a.tar?sig=1"),
        ("a.txt.GZ", "https://h/a.txt.GZ"),  # as it is
        ("a.json.gz", "a.json.gz"),
        ("a.ldjson", "a.ldjson"),
        ("A.PARQUET", "A.PARQUET"),
    ],
)
def test_kinds_of_names_that_have_changed(before: str, now: str) -> None:
    assert not has_kind_as_before(now, before)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson.gz", "x/a.tgz", "a.tar.zst", "a.parquet", "a.txt", "a", "a.json.txt", "a.gz"]
)
def test_kinds_of_names_that_have_not(name: str) -> None:
    assert has_kind_as_before(f"https://user:key@h/{name}", name)


def test_parquet_is_read_as_before(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    assert open_shard(tmp_path / "a.parquet", "a", "parquet").cut(0, 1 << 60).is_as_before()


def test_keys_that_had_secrets() -> None:
    """The kind follows from the name that the checkpoint has, with its secret."""
    shards = ShardList("https://h", ("a.jsonl?***",), ("https://h/a.jsonl?sig=1",), np.array([1]))
    source = DocumentSource.new("a", shards, lanes=2)
    with pytest.raises(ValueError, match=r"a.jsonl\?\*\*\* of a is read as JSON Lines, and was not; ") as raised:
        earlier.check_kinds(source, ["a.jsonl?sig=p4ss"])
    assert "p4ss" not in str(raised.value)
    earlier.check_kinds(source, ["get?file=a.jsonl"])
    (_, line) = earlier.remarks([source], has_other_keys=True)
    assert line.startswith("the names of its shards had secrets: other documents are held out from now on")
