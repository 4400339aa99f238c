"""Lists of shards with checksums, as sha256sum and md5sum write them."""

import hashlib
import os
import re
import subprocess
from pathlib import Path

import fsspec
import pytest

from mpitrain.job.data import shards
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.checksums import read_checksums
from mpitrain.job.data.documents import DamagedShardError
from mpitrain.job.data.shards import list_shards

HASH = "0" * 64


@pytest.mark.parametrize("program", ["sha256sum", "md5sum"])
def test_the_lists_of_the_usual_programs(tmp_path: Path, program: str) -> None:
    for name in ("a.jsonl", "b/c d.jsonl", "b/[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    listed = tmp_path / f"all.{program.removesuffix('sum')}"
    words = [program, "a.jsonl", "--binary", "./b/c d.jsonl", "b/[1].jsonl"]
    listed.write_bytes(subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=20).stdout)
    shards = list_shards([str(listed)])
    assert shards.names == ("a.jsonl", "b/[1].jsonl", "b/c d.jsonl") and shards.sizes.tolist() == [15, 19, 19]
    hashed = getattr(hashlib, program.removesuffix("sum"))
    assert shards.checksums == {path: hashed(Path(path).read_bytes()).digest() for path in shards.paths}
    (tmp_path / "b/[1].jsonl").rename(tmp_path / "b/1.jsonl")
    with pytest.raises(ValueError, match=r"b/\[1\].jsonl cannot be read: No such file"):
        list_shards([str(listed)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HASH}  a\n{HASH}  a", "line 2: a comes twice"),
        (f"{HASH}  a\n{HASH}  ./a", "line 2: a comes twice"),
        (f"{HASH}  /etc/passwd", "line 1: expected a name in the list's folder, got '/etc/passwd'"),
        (f"{HASH}  b/../../a", "expected a name in the list's folder"),
        (f"{HASH}  s3://other/a", "expected a name in the list's folder"),
        (f"{HASH}  b/", "expected a name in the list's folder"),
        (f"{HASH[1:]}g  a", "line 1: expected a line of sha256sum, 64 hexadecimal digits, two blanks, and a name; got"),
        (f"{HASH[:32]}  a", "64 hexadecimal digits"),
        (HASH, "64 hexadecimal digits"),
        (f"SHA256 (a) = {HASH}", "64 hexadecimal digits"),
        (f"\\{HASH}  a\\nb", "64 hexadecimal digits"),
        ("\n# nothing\n", "x.sha256 names no file"),
    ],
)
def test_wrong_lists(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_checksums("x.sha256", text.encode())


def test_two_lists_that_differ(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "1.sha256").write_text(f"{HASH}  a.jsonl\r\n")
    (tmp_path / "2.sha256").write_text(f"{HASH[1:]}1  a.jsonl\n")
    assert len(list_shards([f"{tmp_path}/1.sha256", f"{tmp_path}/*.jsonl"]).names) == 1
    with pytest.raises(ValueError, match=r"a.jsonl has two checksums; .*/2.sha256 has the second one"):
        list_shards([f"{tmp_path}/*.sha256"])


@pytest.mark.parametrize("kind", ["a pipe", "a device", "too long"])
def test_lists_that_are_no_files_or_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "all.md5"
    text = f"{path} is {kind}; expected a regular file"
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case _:
            monkeypatch.setattr(shards, "_MOST_LIST_BYTES", 100)
            path.write_text("#" * 101)
            text = f"{path} has 101 bytes; expected at most 100"
            with pytest.raises(ValueError, match=f"^data: file://{re.escape(text)}$"):
                list_shards([f"file://{path}"])
    with pytest.raises(ValueError, match=f"^data: {re.escape(text)}$"):
        list_shards([str(path)])


def test_remote_shards_are_checked(tmp_path: Path) -> None:
    memory, good, bad = fsspec.filesystem("memory"), hashlib.md5(b"1234"), hashlib.md5(b"4321")
    memory.pipe({"/summed/all.md5": f"{good.hexdigest()}  [a].tar\n{bad.hexdigest()} *b.tar".encode()})
    memory.pipe({"/summed/[a].tar": b"1234", "/summed/b.tar": b"1234"})
    try:
        shards = list_shards(["memory://summed/all.md5"])
        cache = ShardCache(tmp_path, checksums=shards.checksums)
        with cache.local(shards.paths[0], 4) as path:
            assert path.read_bytes() == b"1234"
        text = f"memory://summed/b.tar: expected md5 {bad.hexdigest()} as listed, got {good.hexdigest()}"
        with pytest.raises(DamagedShardError, match=text), cache.local(shards.paths[1], 4):
            pass
        with ShardCache(tmp_path).local(
            shards.paths[1], 4
        ):  # who has no list takes it as it is, but not for the others
            pass
        with pytest.raises(DamagedShardError, match=text), cache.local(shards.paths[1], 4):
            pass
    finally:
        memory.rm("/summed", recursive=True)


@pytest.mark.parametrize("name", ["all.sha256?sig=a/b.tar", "get?f=all.sha256"])
def test_a_list_behind_an_address_with_a_query(name: str) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/listed/a.jsonl", b"text")
    memory.pipe(f"/listed/{name}", f"{HASH}  a.jsonl\n".encode())
    found = list_shards([f"memory://listed/{name}"])
    memory.rm("/listed", recursive=True)
    assert found.names == ("a.jsonl",) and list(found.checksums.values()) == [bytes(32)]
