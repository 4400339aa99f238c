"""Tar files as GNU tar, macOS and old programs make them: samples as their writers meant them, or an error with the entry."""

import io
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from mpitrain.job.data import TarSamples
from mpitrain.job.data.documents import DamagedSampleError, DamagedShardError, open_shard
from mpitrain.job.data.documents.tar import TarReader

BLOCK = 512


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


def tar_of(path: Path, entries: Sequence[tuple[tarfile.TarInfo, bytes]], format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as file:
        for info, data in entries:
            file.addfile(info, io.BytesIO(data))
    return path


def read(path: Path) -> dict[str, dict[str, bytes]]:
    """The samples of a tar file, by both readers: all at once, and one by one."""
    reader = open_shard(path, path.name, "tar")
    assert isinstance(reader, TarReader)
    cut = reader.cut(0, 1 << 60)
    found = {cut.key(index).decode(): cut.parts(index) for index in range(len(cut))}
    assert len(found) == len(cut)
    samples = TarSamples(str(path), dict)
    alone = [samples[index] for index in (*range(len(samples))[::-1], *range(len(samples)))][len(samples) :]
    assert alone == [pickle.loads(pickle.dumps(samples))[index] for index in range(len(samples))]
    assert {sample.pop("__key__"): sample for sample in alone} == found
    return found


def with_header(data: bytes, at: int, change: Callable[[bytearray], None]) -> bytes:
    """A tar file with a change in the header at byte `at`, and the checksum that belongs to it."""
    header = bytearray(data[at : at + BLOCK])
    change(header)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + BLOCK :]


# --- samples whose files stand apart, and names that come twice ---


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["0.txt", "1.txt", "0.json"], r"sample '0' stand apart: '0.txt' is at byte 0, and '0.json' at byte 2048"),
        (["0.txt", "0.json", "1.txt", "0.png"], "sample '0' stand apart: '0.txt' is at byte 0, and '0.png' at"),
        (["d/0.txt", "d/1.txt", "./d/0.json"], "sample 'd/0' stand apart"),
        (["0.txt", "./0.json"], "sample '0' stand apart"),
        (["0.txt", "0.txt"], "two files have the name '0.txt', at the bytes 0 and 1024"),
        (["0.txt", "0.json", "0.txt"], "two files have the name '0.txt', at the bytes 0 and 2048"),
        (["0.txt", "1.txt", "0.txt"], "two files have the name '0.txt'"),
        (["a/0.txt", "1.txt", "a//0.txt"], "two files have the name 'a/0.txt'"),
        (["0", "1.txt", "0"], "two files have the name '0'"),
    ],
)
def test_files_apart_and_names_that_come_twice(tmp_path: Path, names: list[str], words: str) -> None:
    path = tar_of(tmp_path / "a.tar", [entry(name, b"text") for name in names])
    with pytest.raises(DamagedShardError, match=f"^a.tar: .*{words}"):
        open_shard(path, "a.tar", "tar")
    with pytest.raises(DamagedShardError, match=words):
        len(TarSamples(str(path), dict))


def test_a_name_twice_by_append(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        (tmp_path / "0.txt").write_bytes(text)
        subprocess.run(["tar", "-rf", tmp_path / "a.tar", "-C", tmp_path, "0.txt"], check=True)
    with pytest.raises(DamagedShardError, match=r"two files have the name '0.txt'"):
        open_shard(tmp_path / "a.tar", "a.tar", "tar")


def test_an_archive_behind_another_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tar_of(tmp_path / f"{name}.tar", [entry(f"{name}.txt", name.encode())])
    (tmp_path / "both.tar").write_bytes((tmp_path / "a.tar").read_bytes() + (tmp_path / "b.tar").read_bytes())
    with pytest.raises(DamagedShardError, match="the archive ends at byte 1024, and another one follows at byte 10240"):
        open_shard(tmp_path / "both.tar", "both.tar", "tar")
    subprocess.run(["tar", "-Af", "a.tar", "b.tar"], cwd=tmp_path, check=True)
    assert read(tmp_path / "a.tar") == {"a": {"txt": b"a"}, "b": {"txt": b"b"}}


def test_a_file_without_its_end_is_told(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", [entry("0.txt", b"0"), entry("1.txt", b"1")])
    assert open_shard(path, "a.tar", "tar").remark == ""
    path.write_bytes(path.read_bytes()[: 2 * BLOCK])
    assert "its end may be missing" in open_shard(path, "a.tar", "tar").remark


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_name_without_its_file(tmp_path: Path, format: int) -> None:
    data = tar_of(tmp_path / "a.tar", [entry("0.txt", b"0"), entry("x" * 200 + ".txt", b"1")], format).read_bytes()
    (tmp_path / "a.tar").write_bytes(data[: 4 * BLOCK] + bytes(2 * BLOCK))
    with pytest.raises(DamagedShardError, match="no entry follows the header at byte 1024, which is about one"):
        open_shard(tmp_path / "a.tar", "a.tar", "tar")
    if format == tarfile.PAX_FORMAT:
        (tmp_path / "a.tar").write_bytes(data[: 4 * BLOCK] + data[2 * BLOCK :])
        with pytest.raises(DamagedShardError, match="the pax header at byte 2048 follows another one, and no entry"):
            open_shard(tmp_path / "a.tar", "a.tar", "tar")
    else:
        (tmp_path / "a.tar").write_bytes(data[: 3 * BLOCK] + bytes(BLOCK) + data[4 * BLOCK :])
        with pytest.raises(DamagedShardError, match="the long name at byte 1024 is empty"):
            open_shard(tmp_path / "a.tar", "a.tar", "tar")


# --- links ---


@pytest.mark.parametrize("format", ["gnu", "posix", "ustar", "v7"])
def test_links_of_tar(tmp_path: Path, format: str) -> None:
    """Hard links, and symbolic links up, down, through folders and through other links."""
    folder = tmp_path / "s"
    (folder / "inner").mkdir(parents=True)
    texts = {f"{number}.txt": b"text %d" % number for number in range(3)} | {"inner/x.txt": b"text x"}
    for name, data in texts.items():
        (folder / name).write_bytes(data)
    os.link(folder / "0.txt", folder / "3.txt")
    for name, target in (
        ("4.txt", "1.txt"), ("5.txt", "inner/x.txt"), ("inner/6.txt", "../0.txt"), ("7.txt", "./4.txt"),
        ("z", "inner"), ("8.txt", "z/x.txt"), ("9.txt", "3.txt"),
    ):  # fmt: skip
        os.symlink(target, folder / name)
    command = ["tar", f"--format={format}", "--sort=name", "-cf", tmp_path / "a.tar", "-C", tmp_path, "s"]
    subprocess.run(command, check=True)
    with pytest.warns(UserWarning, match=r"a.tar: 1 of its entries is left out, as .*: 's/z'"):
        found = read(tmp_path / "a.tar")
    files = sorted(folder.rglob("*.txt"))
    expected = {str(path.relative_to(tmp_path).with_suffix("")): {"txt": path.read_bytes()} for path in files}
    assert len(expected) == 11 and found == expected


def test_a_link_is_a_part_of_a_sample(tmp_path: Path) -> None:
    entries = [entry("0.txt", b"zero"), link("0.md", "0.txt"), entry("1.txt", b"one"), link("1.md", "0.txt", b"1")]
    assert read(tar_of(tmp_path / "a.tar", entries)) == {
        "0": {"txt": b"zero", "md": b"zero"},
        "1": {"txt": b"one", "md": b"zero"},
    }


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert len(read(tar_of(tmp_path / "a.tar", [entry("x" * 4092 + ".txt", b"0")], format))) == 1
        path = tar_of(tmp_path / "a.tar", [entry("x" * 4093 + ".txt", b"0")], format)
        with pytest.raises(
            DamagedShardError, match=r"a.tar: the entry at byte \d+ has a name of 4097 bytes; expected 4096"
        ):
            open_shard(path, "a.tar", "tar")


def test_long_names_of_links(tmp_path: Path) -> None:
    name = f"{'x' * 120}/{'y' * 120}.txt"
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        entries = [entry(name, b"long"), link("1.txt", name, b"1"), link("2.txt", name)]
        assert [parts["txt"] for parts in read(tar_of(tmp_path / "a.tar", entries, format)).values()] == [b"long"] * 3


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/etc/passwd", "'0.txt' leads to '/etc/passwd', which is not in this tar file"),
        ("../../etc/passwd", "which is not in this tar file"),
        ("other.txt", "which is not in this tar file"),
        ("0.txt", "and so on in a circle"),
        ("2.txt", "and so on in a circle"),
        ("x/" * 3000, "a path that is too long"),
        ("", "which is not in this tar file"),
    ],
)
@pytest.mark.parametrize("kind", [b"1", b"2"])
def test_links_that_lead_nowhere_are_damaged_samples(tmp_path: Path, target: str, words: str, kind: bytes) -> None:
    if kind == b"1" and target == "2.txt":
        words = "and so on in a circle"
    entries = [link("0.txt", target, kind), entry("1.txt", b"one"), link("2.txt", "0.txt", kind)]
    path = tar_of(tmp_path / "a.tar", entries, tarfile.PAX_FORMAT)
    cut = open_shard(path, "a.tar", "tar").cut(0, 1 << 60)
    samples = TarSamples(str(path), dict)
    with pytest.raises(DamagedSampleError, match=f"^a.tar, sample '0', '0.txt': the link .*{words}"):
        cut.text(0)
    with pytest.raises(DamagedSampleError, match=words):
        samples[0]
    assert cut.text(1) == samples[1]["txt"] == b"one"


def test_hard_links_with_a_size(tmp_path: Path) -> None:
    """POSIX's pax writes the bytes again; old programs write the size of the file without its bytes, as they do for folders."""

    def has_five_bytes(header: bytearray) -> None:
        header[124:136] = b"%011o\0" % 5

    entries = [entry("0.txt", b"12345"), link("1.txt", "0.txt", b"1"), entry("2.txt", b"two")]
    without = with_header(tar_of(tmp_path / "a.tar", entries).read_bytes(), 1024, has_five_bytes)
    (tmp_path / "a.tar").write_bytes(without)
    expected = {"0": {"txt": b"12345"}, "1": {"txt": b"12345"}, "2": {"txt": b"two"}}
    assert read(tmp_path / "a.tar") == expected
    (tmp_path / "a.tar").write_bytes(without[:1536] + b"again".ljust(BLOCK, b"\0") + without[1536:])
    assert read(tmp_path / "a.tar") == expected | {"1": {"txt": b"again"}}


# --- sparse files ---


def holey(path: Path, pieces: Sequence[tuple[int, bytes]], size: int = 0) -> bytes:
    with open(path, "wb") as file:
        for place, data in pieces:
            file.seek(place)
            file.write(data)
        if size:
            file.truncate(size)
    return path.read_bytes()


SPARSE = [
    "--format=gnu",
    "--format=posix --sparse-version=0.0",
    "--format=posix --sparse-version=0.1",
    "--format=posix",
]


@pytest.mark.parametrize("options", SPARSE)
def test_sparse_files_of_tar(tmp_path: Path, options: str) -> None:
    """With a hole first, in the middle and last, more places than a header has, no bytes at all, and hard links to one."""
    step = 1 << 16
    files = {
        "0.txt": holey(tmp_path / "0.txt", [(1 << 20, b"end")]),
        "1.txt": holey(tmp_path / "1.txt", [(0, b"begin"), (step, b"middle")], 3 * step),
        "2.txt": holey(tmp_path / "2.txt", [(2 * n * step, b"%d" % n) for n in range(60)]),
        "3.txt": holey(tmp_path / "3.txt", [], 2 * step),
        "5.txt": b"plain",
    }
    os.link(tmp_path / "1.txt", tmp_path / "4.txt")
    (tmp_path / "5.txt").write_bytes(b"plain")
    files["4.txt"] = files["1.txt"]
    command = ["tar", *options.split(), "-S", "-cf", tmp_path / "a.tar", "-C", tmp_path, *sorted(files)]
    subprocess.run(command, check=True)
    assert (tmp_path / "a.tar").stat().st_size < 1 << 20
    assert read(tmp_path / "a.tar") == {name[0]: {"txt": data} for name, data in files.items()}


def test_damaged_maps_of_sparse_files(tmp_path: Path) -> None:
    holey(tmp_path / "0.txt", [(0, b"x" * 4096), (1 << 20, b"end")])
    for options in SPARSE:
        subprocess.run(["tar", *options.split(), "-S", "-cf", tmp_path / "a.tar", "-C", tmp_path, "0.txt"], check=True)
        data = (tmp_path / "a.tar").read_bytes()
        if "gnu" in options:
            at = data.index(b"00004000000")
            data = with_header(data[:at] + b"00000000100" + data[at + 11 :], 0, lambda header: None)
        else:
            at = data.index(b"1048576")
            data = data[:at] + b"0000100" + data[at + 7 :]
        (tmp_path / "a.tar").write_bytes(data)
        with pytest.raises(
            DamagedShardError, match=r"a.tar: the entry at byte \d+ is a sparse file with a damaged map"
        ):
            open_shard(tmp_path / "a.tar", "a.tar", "tar")


def test_a_sparse_file_that_would_take_all_memory(tmp_path: Path) -> None:
    (tmp_path / "0.txt").touch()
    os.truncate(tmp_path / "0.txt", 1 << 40)
    command = ["tar", "-S", "--format=posix", "-cf", tmp_path / "a.tar", "-C", tmp_path, "0.txt"]
    subprocess.run(command, check=True)
    cut = open_shard(tmp_path / "a.tar", "a.tar", "tar").cut(0, 1 << 60)
    with pytest.raises(
        DamagedSampleError, match=f"'0.txt': a sparse file with {1 << 40} bytes; expected {128 << 20} at most"
    ):
        cut.text(0)


# --- hidden files, folders and other entries ---


def test_hidden_files(tmp_path: Path) -> None:
    """Those of macOS are left out without a word, also between the files of a sample; others with one."""
    mac = [
        entry("./._0.txt", b"\0\5\x16\7\xff"), entry("./0.txt", b"0"), entry("./._0.json", b"\0\5\x16\7"), entry("./0.json", b"{}"),
        entry("./.DS_Store", b"\0\0\0\1Bud1"), entry("./d/1.txt", b"1"), entry("__MACOSX/d/._1.txt", b"\0\5\x16\7"),
    ]  # fmt: skip
    expected = {"./0": {"txt": b"0", "json": b"{}"}, "./d/1": {"txt": b"1"}}
    assert read(tar_of(tmp_path / "a.tar", mac)) == expected
    others = [*mac, entry(".gitkeep"), entry("d/.cache.json", b"{}")]
    with pytest.warns(UserWarning, match=r"2 of its entries are left out, .*: '.gitkeep' and others"):
        assert read(tar_of(tmp_path / "a.tar", others)) == expected


def test_folders_of_old_programs(tmp_path: Path) -> None:
    """A file of the first kind of all, with a name that ends in a slash, is a folder."""
    old = [entry("d/", type=tarfile.AREGTYPE), entry("d/0.txt", b"0", type=tarfile.AREGTYPE)]
    assert read(tar_of(tmp_path / "a.tar", old)) == {"d/0": {"txt": b"0"}}
    with pytest.warns(UserWarning, match="1 of its entries is left out, .*: 'f'"):
        assert read(tar_of(tmp_path / "a.tar", [*old, link("f", "d"), link("1.txt", "f/0.txt")])) == {
            "d/0": {"txt": b"0"},
            "1": {"txt": b"0"},
        }
    with pytest.raises(DamagedShardError, match="the file 'd/' at byte 0 has the name of a folder"):
        open_shard(tar_of(tmp_path / "a.tar", [entry("d/", b"text")]), "a.tar", "tar")


def test_entries_that_are_not_known(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", [entry("0.txt", b"0"), entry("1.txt", b"1", type=b"M")])
    with pytest.raises(
        DamagedShardError, match=r"a.tar: the entry at byte 1024 is of the kind 'M', which is not known"
    ):
        open_shard(path, "a.tar", "tar")
    for key in ("path", "size", "linkpath", "GNU.sparse.size"):
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={key: "1"}) as file:
            file.addfile(entry("0.txt")[0])
        with pytest.raises(
            DamagedShardError, match="the pax header at byte 0 gives all files that follow one name or size"
        ):
            open_shard(path, "a.tar", "tar")
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "of git"}) as file:
        file.addfile(entry("0.txt")[0])
    assert read(path) == {"0": {"txt": b""}}


def test_parts_of_one_name(tmp_path: Path) -> None:
    """Names that are not UTF-8 stay apart; the name of the sample's name is none of a part."""
    names = [os.fsdecode(b"0.\xff"), os.fsdecode(b"0.\xfe")]
    path = tar_of(tmp_path / "a.tar", [entry(name, b"%d" % n) for n, name in enumerate(names)])
    assert read(path) == {"0": {"\\xff": b"0", "\\xfe": b"1"}}
    with pytest.raises(DamagedSampleError, match="a part has the name __key__"):
        TarSamples(str(tar_of(path, [entry("0.__key__", b"x")])), dict)[0]


def test_readers_of_parts_agree_with_the_whole(tmp_path: Path) -> None:
    """Any parts of a tar file with links and hidden files make the whole."""
    rng = np.random.default_rng(0)
    entries = []
    for number in range(60):
        entries += [entry(f"{number}.txt", b"%d " % number * int(rng.integers(300))), entry(f"._{number}.json", b"m")]
        entries.append(link(f"{number}.json", f"{rng.integers(60)}.txt", b"2"))
    path = tar_of(tmp_path / "a.tar", entries)
    reader = open_shard(path, "a.tar", "tar")
    everything = reader.cut(0, 1 << 60)
    expected = {everything.key(index): everything.text(index) for index in range(len(everything))}
    for step in (512, 5000):
        cuts = [reader.cut(begin, begin + step) for begin in range(0, path.stat().st_size, step)]
        found = [(cut.key(index), cut.text(index)) for cut in cuts for index in range(len(cut))]
        assert len(found) == 60 and dict(found) == expected
    assert len(read(path)) == 60


@pytest.mark.parametrize("number", [1, 600])
def test_checksums_of_signed_bytes(tmp_path: Path, number: int) -> None:
    """Old programs write them. A checksum that is neither of the two sums is an error."""
    names = [f"{index:03}-\u00e9t\u00e9" for index in range(number)]
    data = bytearray(tar_of(tmp_path / "a.tar", [entry(f"{name}.txt", name.encode()) for name in names]).read_bytes())
    for at in range(0, 2 * number * BLOCK, 2 * BLOCK):
        header = data[at : at + 148] + b" " * 8 + data[at + 156 : at + BLOCK]
        data[at + 148 : at + 156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in header)
    (tmp_path / "a.tar").write_bytes(data)
    with tarfile.open(tmp_path / "a.tar") as file:
        assert file.getnames() == [f"{name}.txt" for name in names]
    assert read(tmp_path / "a.tar") == {name: {"txt": name.encode()} for name in names}
    data[0] += 1
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(DamagedShardError, match="header at byte 0 is damaged: its checksum is wrong"):
        read(tmp_path / "a.tar")


def test_one_warning_of_all_shards_without_their_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tells it, and a worker of it if nobody else has read the files; errors have no secrets, either."""
    entries = [entry("0.txt", b"0"), entry(".hidden", b"1")]
    memory = fsspec.filesystem("memory")
    for number in range(3):
        memory.pipe(f"/told/{number}.tar?key=S3CRET", tar_of(tmp_path / "a.tar", entries).read_bytes())
    names = [f"memory://told/{number}.tar?key=S3CRET" for number in range(3)]

    def samples(*names: str) -> TarSamples[dict[str, Any]]:
        return TarSamples(names, dict, cache=str(tmp_path / "cache"))

    ours = samples(*names)
    of_workers = [pickle.loads(pickle.dumps(ours)) for _ in range(2)]  # they read the files themselves
    with pytest.warns(UserWarning, match="^memory:.*/told/0.tar.key=.*: 1 of its entries is left out") as warned:
        assert [len(each) for each in (of_workers[0], ours, of_workers[1])] == [3, 3, 3]
    (warning,) = warned
    assert "0.tar?key=***: 1 of" in str(warning.message)
    assert str(warning.message).endswith(" (the first of 3 tar files of which there is something to tell)")
    assert warning.filename == __file__
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    of_other_rank = samples(*names)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")  # as in its workers
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    assert len(of_other_rank) == len(pickle.loads(pickle.dumps(of_other_rank))) == 3
    memory.pipe("/told/a.jsonl?key=S3CRET", b"{}")
    for end, data in ((".tar", b"no tar file" * 100), (".tar.gz", b"no gzip")):
        memory.pipe(f"/told/4{end}?key=S3CRET", data)
        with pytest.raises(DamagedShardError) as caught:
            len(samples(f"memory://told/4{end}?key=S3CRET"))
        assert f"4{end}?key=***" in str(caught.value) and "S3CRET" not in str(caught.value)
    memory.pipe("/told/5.tar?key=S3CRET", b"")
    for name in (
        "memory://told/5.tar?key=S3CRET",
        "memory://told/6.tar?key=S3CRET",
        "memory://told/a.jsonl?key=S3CRET",
    ):
        with pytest.raises(ValueError, match=r"\?key=\*\*\*") as caught_early:
            samples(name)
        assert "S3CRET" not in str(caught_early.value)
    memory.rm("/told", recursive=True)


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sockets with a name and no file")
def test_one_warning_of_workers_that_end_with_each_epoch(tmp_path: Path) -> None:
    """As those of a DataLoader without persistent_workers, and a sampler that does not ask for the length."""
    path = tar_of(tmp_path / "a.tar", [entry("0.txt", b"0"), entry(".hidden", b"1")])
    samples = TarSamples(str(path), dict)

    program = [sys.executable, "-c", "import pickle, sys; len(pickle.load(sys.stdin.buffer))"]
    for expected in (1, 0):
        ended = subprocess.run(program, input=pickle.dumps(samples), capture_output=True, check=True)
        assert ended.stderr.count(b"1 of its entries is left out") == expected
    assert len(samples) == 1  # without a warning, which would be an error
