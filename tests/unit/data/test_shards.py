"""Names of shards: brace ranges, lists, globs and URLs."""

import os
from pathlib import Path

import pytest

from mpitrain.data.shards import expanded, list_shards, unpacked


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a", ["a"]),
        ("a-{0..2}", ["a-0", "a-1", "a-2"]),
        ("a-{008..011}.tar", ["a-008.tar", "a-009.tar", "a-010.tar", "a-011.tar"]),
        ("{x,y}/{0..1}", ["x/0", "x/1", "y/0", "y/1"]),
        ("{a,}", ["a", ""]),
    ],
)
def test_braces(pattern: str, names: list[str]) -> None:
    assert list(expanded(pattern)) == names


@pytest.mark.parametrize("pattern", ["{3..1}", "{}", "{a}", "{a..b}", "{0..99999999999}", "{1..9999}{1..9999}"])
def test_wrong_braces(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"expected a range|more than"):
        list(expanded(pattern))


def test_files_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/2.tar", "b/1.tar", "a/0.tar", "a/skip.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * (1 + len(name)))
    shards = list_shards([f"{tmp_path}/b/*.tar", f"{tmp_path}/{{a,b}}/[01].tar"])
    assert (shards.folder, shards.names) == (str(tmp_path), ("a/0.tar", "b/1.tar", "b/2.tar"))
    assert shards.sizes.tolist() == [8, 8, 8] and Path(shards.paths[1]).read_bytes() == b"x" * 8
    names, sizes = unpacked(shards.packed())
    assert names == shards.names and sizes.tolist() == shards.sizes.tolist()
    (only,) = list_shards([f"{tmp_path}/a/0.tar"]).names
    assert only == "0.tar"


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"x")
    (tmp_path / "empty.tar").touch()
    for patterns, text in (
        ([f"{tmp_path}/b.tar"], "b.tar cannot be read: No such file"),
        ([f"{tmp_path}/*.jsonl"], r"\*.jsonl names no file"),
        ([str(tmp_path)], "is a folder; expected shards, such as .*/\\*.jsonl"),
        ([f"{tmp_path}/*.tar"], "empty.tar is empty"),
        ([], "expected the names of shards"),
    ):
        with pytest.raises(ValueError, match=text):
            list_shards(patterns)


def test_urls() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name in ("s/1.jsonl", "s/2.jsonl"):
        memory.pipe(f"/bucket/{name}", b"1234")
    try:
        for pattern in ("memory://bucket/s/*.jsonl", "memory://bucket/s/{1..2}.jsonl"):
            shards = list_shards([pattern])
            assert shards.names == ("1.jsonl", "2.jsonl") and shards.sizes.tolist() == [4, 4]
            assert memory.cat(shards.paths[1]) == b"1234"
        with pytest.raises(ValueError, match=r"memory://bucket/s/3.jsonl cannot be read: .*No such file"):
            list_shards(["memory://bucket/s/3.jsonl"])
    finally:
        memory.rm("/bucket", recursive=True)


def test_names_that_are_not_utf8_survive(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"part-\xff.jsonl")
    path.write_bytes(b"x")
    shards = list_shards([f"{tmp_path}/*.jsonl"])
    assert unpacked(shards.packed())[0] == shards.names == (path.name,)
