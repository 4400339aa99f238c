"""Readers of shards: what each format means, and what is damaged."""

import io
import json
import os
import resource
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from collectives.texts import without_secrets
from mpitrain.job.data.documents import DamagedSampleError, DamagedShardError, Reader, kind_of, open_shard
from mpitrain.job.data.documents.kinds import is_compressed
from mpitrain.job.data.documents.reading import MappedFile
from mpitrain.job.data.documents.text import MOST_BYTES
from mpitrain.job.data.open_shards import OpenShards
from mpitrain.job.data.shards import ShardList

SAMPLES = {f"{number:04}": b"text of %d\n" % number * number for number in range(20)}


def tar_of(path: Path, files: dict[str, bytes], format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as file:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def read(reader: Reader, begin: int = 0, end: int = 1 << 40) -> dict[str, bytes]:
    cut = reader.cut(begin, end)
    return {cut.key(index).decode(): cut.text(index) for index in range(len(cut))}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("folder", ["", "deep/", "x" * 90 + "/" + "y" * 60 + "/", "x" * 140 + "/"])
def test_tar_files_of_every_format(tmp_path: Path, format: int, folder: str) -> None:
    if format == tarfile.USTAR_FORMAT and len(folder) == 141:
        pytest.skip("a name of ustar has 100 bytes after a folder's end")
    files = {f"{folder}{key}.txt": data for key, data in SAMPLES.items()}
    path = tar_of(tmp_path / "a.tar", files, format)
    reader = open_shard(path, "a.tar", "tar")
    assert read(reader) == {folder + key: data for key, data in SAMPLES.items()}
    size = path.stat().st_size
    for step in (512, 1000, 4096):  # any parts make the whole, and no document comes twice
        parts = [read(reader, begin, begin + step) for begin in range(0, size, step)]
        assert sum(map(len, parts)) == len(SAMPLES)
        assert {key: data for part in parts for key, data in part.items()} == read(reader)
    reader.close()


def test_a_size_in_base_256_and_in_a_pax_header(tmp_path: Path) -> None:
    plain = tar_of(tmp_path / "a.tar", {"a.txt": b"12345", "b.txt": b"678"}).read_bytes()
    header = bytearray(plain[:512])
    header[124:136] = b"\x80" + (5).to_bytes(11, "big")
    (tmp_path / "256.tar").write_bytes(with_checksum(header) + plain[512:])
    assert read(open_shard(tmp_path / "256.tar", "x", "tar")) == {"a": b"12345", "b": b"678"}
    with tarfile.open(tmp_path / "pax.tar", "w", format=tarfile.PAX_FORMAT) as file:
        info = tarfile.TarInfo("a.txt")
        info.size, info.pax_headers = 5, {"comment": "one = two", "size": "5"}
        file.addfile(info, io.BytesIO(b"12345"))
    assert read(open_shard(tmp_path / "pax.tar", "x", "tar")) == {"a": b"12345"}


def with_checksum(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_parts_of_a_sample(tmp_path: Path) -> None:
    files = {"d.x/1.txt": b"one", "d.x/1.seg.json": b"{}", "d.x/2.txt": b"two", "d.x/2.png": b"p"}
    reader = open_shard(tar_of(tmp_path / "a.tar", files), "a.tar", "tar")
    cut = reader.cut(0, 1 << 30)
    assert [cut.parts(index) for index in range(len(cut))] == [  # type: ignore[attr-defined]
        {"txt": b"one", "seg.json": b"{}"},
        {"txt": b"two", "png": b"p"},
    ]
    assert read(reader) == {"d.x/1": b"one", "d.x/2": b"two"}
    other = open_shard(tmp_path / "a.tar", "a.tar", "tar", "seg.json").cut(0, 1 << 30)
    assert other.text(0) == b"{}"
    with pytest.raises(
        DamagedSampleError, match=r"a.tar, sample 'd.x/2': expected a part 'seg.json', got \['png', 'txt'\]"
    ):
        other.text(1)


def test_a_sample_with_parts_in_two_pieces_of_the_headers(tmp_path: Path) -> None:
    inner = tar_of(tmp_path / "inner.tar", {"0001.txt": b"a member that looks like a member"}).read_bytes()
    files = {"first.txt": inner} | {f"{n:04}.{part}": b"%d" % n for n in range(2000) for part in ("txt", "json")}
    path = tar_of(tmp_path / "a.tar", files)
    reader = open_shard(path, "a.tar", "tar")
    assert read(reader) == {"first": inner} | {f"{n:04}": b"%d" % n for n in range(2000)}
    cut = reader.cut(0, 1 << 30)
    assert [list(cut.parts(index)) for index in range(len(cut))] == [["txt"]] + 2000 * [["txt", "json"]]  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    at = data.rindex(b"1999.json")
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        DamagedShardError, match=f"a.tar: the tar header at byte {at} is damaged: its checksum is wrong"
    ):
        open_shard(path, "a.tar", "tar")


def test_folders_and_pipes_in_tar_files_are_no_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for kind, name in ((tarfile.DIRTYPE, "d"), (tarfile.FIFOTYPE, "d/f.txt"), (tarfile.CHRTYPE, "d/zero.txt")):
            info = tarfile.TarInfo(name)
            info.type = kind
            file.addfile(info)
        info = tarfile.TarInfo("d/a.txt")
        info.size = 1
        file.addfile(info, io.BytesIO(b"x"))
    reader = open_shard(tmp_path / "a.tar", "a.tar", "tar")
    assert read(reader) == {"d/a": b"x"}
    assert "2 of its entries are left out" in reader.remark and "'d/f.txt' and others" in reader.remark


@pytest.mark.parametrize("name", ["/etc/passwd", "../../a.txt", "a/../../b.txt"])
def test_a_name_that_would_leave_its_folder_is_a_damaged_sample(tmp_path: Path, name: str) -> None:
    cut = open_shard(tar_of(tmp_path / "a.tar", {name: b"x", "good.txt": b"y"}), "a.tar", "tar").cut(0, 1 << 30)
    with pytest.raises(DamagedSampleError, match="expected a relative name without"):
        cut.text(0)
    assert cut.text(1) == b"y"


def lost_size(data: bytearray) -> None:
    data[124:136] = b"not a number"


def negative_size(data: bytearray) -> None:
    data[124:136] = b"\xff" * 12


def huge_size(data: bytearray) -> None:
    data[:512] = with_checksum(bytearray(data[:124] + b"\x80" + (1 << 80).to_bytes(11, "big") + data[136:512]))


def changed_name(data: bytearray) -> None:
    data[0] ^= 1


def cut_in_data(data: bytearray) -> None:
    del data[512 + 3 :]


def cut_in_header(data: bytearray) -> None:
    del data[1024 + 100 :]


def endless_name(data: bytearray) -> None:
    data[:512] = with_checksum(bytearray(data[:124] + b"%011o\0" % (1 << 21) + data[136:156] + b"L" + data[157:512]))
    data.extend(bytes(2 << 20))


def endless_number(data: bytearray) -> None:
    record = b"%d size=%s\n" % (5000 + 11, b"9" * 5000)
    header = with_checksum(bytearray(data[:124] + b"%011o\0" % len(record) + data[136:156] + b"x" + data[157:512]))
    data[:] = header + record + bytes(-len(record) % 512) + data


def damaged_pax(data: bytearray) -> None:
    data[:512] = with_checksum(bytearray(data[:156] + b"x" + data[157:512]))


DAMAGES: dict[Callable[[bytearray], None], str] = {
    lost_size: "the tar header at byte 0 is damaged: it has no size",
    negative_size: "the tar header at byte 0 is damaged: it has no size",
    huge_size: r"the file is cut off: it has \d+ bytes, and its member at byte 0 ends at byte \d+",
    changed_name: "the tar header at byte 0 is damaged: its checksum is wrong",
    cut_in_data: "the file is cut off: it has 515 bytes, and its member at byte 0 ends at byte 521",
    cut_in_header: "the file is cut off: it has 1124 bytes, and its header at byte 1024 has 512",
    endless_name: r"the tar header at byte 0 has 2097152 bytes of names",
    endless_number: r"the pax header at byte 0 is damaged: its size is b'9+'",
    damaged_pax: "the pax header at byte 0 is damaged",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_tar_files(tmp_path: Path, damage: Callable[[bytearray], None]) -> None:
    data = bytearray(tar_of(tmp_path / "a.tar", {"a.txt": b"text of a", "b.txt": b"text"}).read_bytes())
    damage(data)
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DamagedShardError, match=f"^a.tar: .*{DAMAGES[damage]}"):
        open_shard(tmp_path / "a.tar", "a.tar", "tar")


def test_text_that_is_no_tar_file(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"all work and no play\n" * 100)
    with pytest.raises(DamagedShardError, match="the tar header at byte 0 is damaged"):
        open_shard(tmp_path / "a.tar", "a.tar", "tar")


@pytest.mark.parametrize("kind", ["tar", "lines", "text", "parquet"])
def test_an_empty_file(tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "empty").touch()
    with pytest.raises(DamagedShardError, match=r"^empty: "):
        open_shard(tmp_path / "empty", "empty", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["\n", "", "\n\n"])
def test_json_lines(tmp_path: Path, end: str) -> None:
    texts = [f"zeile {n} \u00e4\u4e16 " * n for n in range(30)]
    lines = "\n".join(json.dumps({"n": n, "text": text, "more": [n] * n}) for n, text in enumerate(texts)) + end
    (tmp_path / "a.jsonl").write_text(lines)
    reader = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines")
    assert list(read(reader).values()) == [text.encode() for text in texts]
    size = (tmp_path / "a.jsonl").stat().st_size
    for step in (1, 7, 64, 1000):
        parts = [read(reader, begin, begin + step) for begin in range(0, size, step)]
        assert [text for part in parts for text in part.values()] == [text.encode() for text in texts]
    keys = list(read(reader))
    assert len(set(keys)) == 30 and keys[1].startswith("a.jsonl:")
    other = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines", "n").cut(0, 1 << 30)
    with pytest.raises(DamagedSampleError, match=r"a.jsonl, the line at byte 0: expected an object with text in 'n'"):
        other.text(0)


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b'{"other": 1}', b'{"text": 1}', b'{"text": "\xff\xfe"}', b'{"text": "\\ud800"}', b"[" * 100_000],
)
def test_damaged_lines_are_damaged_samples(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    cut = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines").cut(0, 1 << 30)
    assert (cut.text(0), cut.text(2)) == (b"before", b"after")
    with pytest.raises(DamagedSampleError, match=r"a.jsonl, the line at byte 19"):
        cut.text(1)


def test_a_text_is_a_document_and_a_long_one_several(tmp_path: Path) -> None:
    short, long = b"a few words", b"a line of words\n" * (3 * MOST_BYTES // 16)
    (tmp_path / "a.txt").write_bytes(short)
    assert read(open_shard(tmp_path / "a.txt", "d/a.txt", "text")) == {"d/a.txt": short}
    (tmp_path / "b.txt").write_bytes(long)
    reader = open_shard(tmp_path / "b.txt", "b.txt", "text")
    documents = read(reader)
    assert len(documents) == 3 and b"".join(documents.values()) == long
    assert all(text.endswith(b"\n") for text in documents.values())
    parts = [read(reader, begin, begin + 4096) for begin in range(0, len(long), 4096)]
    assert {key: text for part in parts for key, text in part.items()} == documents
    (tmp_path / "c.txt").write_bytes(b"x" * (3 * MOST_BYTES))
    assert len(read(open_shard(tmp_path / "c.txt", "c.txt", "text"))) == 1, "it has no lines"


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"row {n} " * n for n in range(100)]
    table = arrow.table({"n": list(range(100)), "text": [*texts[:99], None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    reader = open_shard(tmp_path / "a.parquet", "a.parquet", "parquet")
    size, found = (tmp_path / "a.parquet").stat().st_size, []
    for begin in range(0, size, 500):
        cut = reader.cut(begin, begin + 500)
        for index in range(len(cut)):
            assert cut.key(index) == f"a.parquet:{len(found)}".encode()
            if len(found) == 99:
                with pytest.raises(DamagedSampleError, match=r"a.parquet, row 99: expected text, got null"):
                    cut.text(index)
            found.append(b"" if len(found) == 99 else cut.text(index))
    assert found == [text.encode() for text in texts[:99]] + [b""]
    with pytest.raises(DamagedShardError, match="expected a column 'words', got n, text"):
        open_shard(tmp_path / "a.parquet", "a.parquet", "parquet", "words")
    with pytest.raises(DamagedShardError, match="expected strings in the column 'n', got int64"):
        open_shard(tmp_path / "a.parquet", "a.parquet", "parquet", "n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no footer")
    with pytest.raises(DamagedShardError, match=r"b.parquet: expected a Parquet file"):
        open_shard(tmp_path / "b.parquet", "b.parquet", "parquet")


def test_kinds() -> None:
    names = {"a.tar": "tar", "a.tar.gz": "tar", "a.tgz": "tar", "a.jsonl.zst": "lines", "a.parquet": "parquet"}
    assert {name: kind_of(name) for name in names} == names
    assert kind_of("a.ndjson") == "lines" and kind_of("notes.md") == kind_of("README") == "text"
    assert [is_compressed(name) for name in names] == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("name", "kind", "packed"),
    [
        ("https://huggingface.co/o/resolve/main/a.jsonl?download=true", "lines", False),
        ("https://b.s3.amazonaws.com/a.jsonl.gz?X-Amz-Credential=k/2026/s3&X-Amz-Signature=0", "lines", True),
        ("http://h/a.tgz#part", "tar", True),
        ("http://h/a.parquet?to=b.jsonl.gz", "parquet", False),
        ("https://h/get?f=p-0.jsonl", "lines", False),
        ("https://h/get?f=p-0.jsonl.zst#1", "lines", True),
        ("https://h/notes.md?x=1", "text", False),
        ("simplecache::https://h/a.tar?x=1", "tar", False),
        ("s3://b/part#1.jsonl", "lines", False),
        ("s3://b/a.jsonl#1", "text", False),
        ("s3://b/what?.jsonl.gz", "lines", True),
        ("s3://b/a.tar?versionId=1", "tar", False),
        ("/data/what.gz?/notes.md", "text", False),
        ("/data/what?/a.jsonl.gz", "lines", True),
        # names in lists
        ("a.jsonl.gz?X-Amz-Signature=***", "lines", True),
        ("get?name=p-0.jsonl", "lines", False),
        ("part#1.jsonl", "lines", False),
    ],
)
def test_kinds_of_addresses(name: str, kind: str, packed: bool) -> None:
    assert (kind_of(name), is_compressed(name)) == (kind, packed)


@pytest.mark.parametrize("query", ["a.jsonl{}?Signature=1", "get?f=a.jsonl{}"])
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_an_address_is_read_by_the_ending_of_its_path(tmp_path: Path, query: str, packing: str) -> None:
    """Whatever chunks a list of names without the secrets of their addresses leads to, each document comes once."""
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(9))
    (tmp_path / "a").write_bytes(lines)
    path = f"https://h/{query.format(packing)}"
    shards = ShardList("https://h", (without_secrets(path)[10:],), (path,), np.array([len(lines)]))
    opened = OpenShards(shards, lambda path, size: nullcontext(tmp_path / "a"))
    cuts = [opened.cut(0, begin, begin + 50) for begin in range(0, len(lines), 50)]
    assert [cut.text(index) for cut in cuts for index in range(len(cut))] == [b"%d" % number for number in range(9)]


def test_more_files_than_the_soft_limit_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("all work and no play")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
    try:
        files = [MappedFile(tmp_path / "a.txt", "a.txt") for _ in range(20)]
        assert {bytes(file.bytes) for file in files} == {b"all work and no play"}
        for file in files:
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
