"""What a shard may take in memory and time: small ones that stand for much are read within bounds, or are errors of one line."""

import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mpitrain.job.data import TarSamples
from mpitrain.job.data.documents import DamagedSampleError, DamagedShardError, lines, open_shard
from mpitrain.job.data.documents.tar import TarReader, reading

BLOCK = 512


def header(name: str, size: int = 0, kind: bytes = b"0", target: str = "", **records: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, target
    info.pax_headers = {key.replace("_", "."): value for key, value in records.items()}
    return info.tobuf(tarfile.PAX_FORMAT)


def padded(data: bytes) -> bytes:
    return data.ljust((len(data) + BLOCK - 1) // BLOCK * BLOCK, b"\0")


def entry(name: str, data: bytes) -> bytes:
    return header(name, len(data)) + padded(data)


def tar_of(path: Path, entries: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(entries) + bytes(2 * BLOCK))
    return path


def peak_of(act: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and the bytes that it took at most."""
    tracemalloc.start()
    try:
        return act(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- tar samples ---


def test_a_sample_of_very_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_PARTS", 1_000)
    path = tar_of(tmp_path / "a.tar", (header(f"a.{number}") for number in range(1_001)))
    reader = open_shard(path, "a.tar", "tar")
    assert isinstance(reader, TarReader)
    cut, samples = reader.cut(0, 1 << 60), TarSamples(str(path), dict)
    for act in (lambda: cut.text(0), lambda: cut.parts(0), lambda: samples[0]):
        with pytest.raises(
            DamagedSampleError, match=r"a.tar, sample 'a': a sample with 1001 parts; expected 1000 at most$"
        ):
            act()


def test_a_message_names_a_few_parts(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", (entry(f"a.{number:03}", b"x") for number in range(300)))
    with pytest.raises(DamagedSampleError, match=r"expected a part 'txt', got \['000', .* '007', ... \(300 parts\)\]$"):
        open_shard(path, "a.tar", "tar").cut(0, 1 << 60).text(0)


def test_a_sample_whose_parts_are_large_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of links to one file, and of files with holes."""
    monkeypatch.setattr(reading, "_MOST_BYTES", 5000)
    large, small = entry("a.0", b"x" * 3000), [entry("b.0", b"y" * 2000), entry("b.1", b"y" * 3000)]
    hole = header("a.2", 0, GNU_sparse_map="", GNU_sparse_size="2001", GNU_sparse_numblocks="0", GNU_sparse_name="a.2")
    for more, size in ((header("a.1", 0, b"1", "a.0"), 6000), (hole, 5001), (entry("a.1", b"x" * 2001), 5001)):
        path = tar_of(tmp_path / "a.tar", [large, more, *small])
        samples = TarSamples(str(path), dict)
        with pytest.raises(
            DamagedSampleError, match=rf"sample 'a': a sample with {size} bytes; expected 5000 at most$"
        ):
            samples[0]
        assert samples[1] == {"0": b"y" * 2000, "1": b"y" * 3000, "__key__": "b"}
        assert open_shard(path, "a.tar", "tar", "0").cut(0, 1 << 60).text(0) == b"x" * 3000, "one part alone"


# --- lines ---


def test_places_of_short_lines_take_12_bytes(tmp_path: Path) -> None:
    num = 4 << 20
    (tmp_path / "a.jsonl").write_bytes(b"1\n" * num)
    reader = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines")
    cut, peak = peak_of(lambda: reader.cut(0, 1 << 60))
    assert len(cut) == num
    assert peak < 13.5 * num + 60e6, "and those of a piece of 1 MiB"
    assert cut.where(num - 1) == f"a.jsonl, the line at byte {2 * num - 2}"


def test_a_part_with_too_many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINES", 1000)
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" * 1001)
    reader = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines")
    with pytest.raises(
        DamagedShardError, match=r"^a.jsonl: more than 1000 lines in a part, of which a compressed shard is one"
    ):
        reader.cut(0, 1 << 60)
    assert len(reader.cut(0, 3000)) == 1000


def test_a_long_line_of_python_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `json` makes an object of each number."""
    monkeypatch.setattr(lines, "_MOST_PYTHON_BYTES", 100)
    short, long = b'{"text": "a", "x": NaN}', b'{"text": "b", "x": [' + b"1," * 100 + b"NaN]}"
    (tmp_path / "a.jsonl").write_bytes(short + b"\n" + long)
    cut = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines").cut(0, 1 << 60)
    assert cut.text(0) == b"a"
    with pytest.raises(DamagedSampleError, match=r"a.jsonl, the line at byte 24: expected an object with text"):
        cut.text(1)


# --- maps of sparse files ---


def sparse(name: str, pairs: list[tuple[int, int]], size: int) -> bytes:
    told = padded(f"{len(pairs)}\n".encode() + b"".join(b"%d\n%d\n" % pair for pair in pairs))
    data = b"x" * sum(length for _, length in pairs)
    records = {
        "GNU_sparse_major": "1",
        "GNU_sparse_minor": "0",
        "GNU_sparse_name": name,
        "GNU_sparse_realsize": str(size),
    }
    return header(name, len(told) + len(data), **records) + told + padded(data)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("pairs", "size"),
    [
        ([(0, 0)] * 40_000, 0),
        ([(2 * number, 1) for number in range(20_000)], 40_000),
        ([(2 * number, 1) for number in range(20_000)], 1 << 40),
    ],
)
def test_maps_of_sparse_files_are_small(tmp_path: Path, pairs: list[tuple[int, int]], size: int) -> None:
    path = tar_of(tmp_path / "a.tar", (sparse(f"{number}.txt", pairs, size) for number in range(3)))
    num_bytes = path.stat().st_size

    def opened() -> int:
        before = tracemalloc.get_traced_memory()[0]
        kept.append(open_shard(path, "a.tar", "tar"))
        return tracemalloc.get_traced_memory()[0] - before

    kept: list[Any] = []
    resident, peak = peak_of(opened)
    assert resident < 1.6 * num_bytes
    assert peak < 1.6 * num_bytes + 15e6, "and one map while it is read"
    cut = kept[0].cut(0, 1 << 60)
    if size == 40_000:
        assert cut.text(2) == b"x\0" * 20_000
    elif size:
        with pytest.raises(
            DamagedSampleError, match="a sparse file with 1099511627776 bytes; expected 134217728 at most"
        ):
            cut.text(2)
    else:
        assert cut.text(2) == b""


# --- links ---


@pytest.mark.parametrize("kind", [b"1", b"2"])
def test_links_follow_one_another_40_times(tmp_path: Path, kind: bytes) -> None:
    chain = [header(f"{number}.txt", 0, kind, f"{number - 1}.txt") for number in range(1, 60)]
    cut = open_shard(tar_of(tmp_path / "a.tar", [entry("0.txt", b"end"), *chain]), "a.tar", "tar").cut(0, 1 << 60)
    assert all(cut.text(number) == b"end" for number in range(41))
    for number in range(41, 60):
        with pytest.raises(DamagedSampleError, match="and so on in a circle, or over too many links"):
            cut.text(number)


def test_folders_count_as_links_too(tmp_path: Path) -> None:
    folders = [header("0", 0, b"2", "d"), *(header(f"{n}", 0, b"2", f"{n - 1}") for n in range(1, 50))]
    links = [header(f"l{n}.txt", 0, b"2", f"{n}/a.txt") for n in range(50)]
    path = tar_of(tmp_path / "a.tar", [entry("d/a.txt", b"a"), *folders, *links])
    cut = open_shard(path, "a.tar", "tar").cut(0, 1 << 60)
    found = {cut.key(index): index for index in range(len(cut))}
    assert [cut.text(found[b"l%d" % n]) for n in range(39)] == [b"a"] * 39
    for n in range(39, 50):
        with pytest.raises(DamagedSampleError, match="or over too many links"):
            cut.text(found[b"l%d" % n])


@pytest.mark.rest
@pytest.mark.parametrize("detour", ["./" * 1900, "a/../" * 700, "b/" * 30 + "a/../" * 600])
def test_many_long_links_take_linear_time(tmp_path: Path, detour: str) -> None:
    """Each leads to the next one, over a path of nearly 4 KB, and an honest one comes last."""
    num = 2000
    links = [header(f"{number}.txt", 0, b"2", f"{detour}{number + 1}.txt") for number in range(num)]
    others = [
        entry(f"{num}.txt", b"end"),
        entry("a/x.txt", b"x"),
        header("b", 0, b"2", "."),
        header("z.txt", 0, b"2", "a/x.txt"),
    ]
    path, began = tar_of(tmp_path / "a.tar", [*others, *links]), time.perf_counter()
    cut = open_shard(path, "a.tar", "tar").cut(0, 1 << 60)
    assert time.perf_counter() - began < 6, "0.4 s on an idle machine"
    assert (cut.key(2), cut.text(2)) == (b"z", b"x")
    with pytest.raises(DamagedSampleError, match=r"too many links|too long"):
        cut.text(4)
