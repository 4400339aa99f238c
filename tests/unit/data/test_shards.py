"""Names of shards: brace ranges, lists, globs and URLs."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpitrain.job.data.shard_names import shard_marks, shard_names
from mpitrain.job.data.shards import ShardList, expanded, in_their_folder, list_shards, unpacked
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.tokenize.documents import Origin
from mpitrain.job.data.tokenize.output import OutputFolder


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
    names, sizes, *_ = unpacked(shards.packed())
    assert names == shards.names and sizes.tolist() == shards.sizes.tolist()
    (only,) = list_shards([f"{tmp_path}/a/0.tar"]).names
    assert only == "0.tar"


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"x")
    (tmp_path / "empty.tar").touch()
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for patterns, text in (
        ([f"{tmp_path}/b.tar"], "b.tar cannot be read: No such file"),
        ([f"{tmp_path}/*.jsonl"], r"\*.jsonl names no file"),
        ([str(tmp_path)], "is a folder; expected shards, such as .*/\\*.jsonl"),
        ([f"{tmp_path}/*.tar"], "empty.tar is empty"),
        ([f"{tmp_path}/pipe.h5"], "pipe.h5 is a pipe; expected a regular file"),
        ([f"{tmp_path}/p*"], "pipe.h5 is a pipe; expected a regular file"),
        ([f"{tmp_path}/zero.json"], "zero.json is a device; expected a regular file"),
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


def test_letters_of_keys_that_mean_something_in_addresses() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    names = ("part#1.jsonl", "part#2.jsonl", "what?.jsonl", "why?.jsonl", "a;b.jsonl")
    for name in names:
        memory.pipe(f"/letters/{name}", b"1234")
    try:
        shards = list_shards(["memory://letters/*.jsonl"])
        assert shards.names == tuple(sorted(names)) and len(set(shards.paths)) == len(names)
        assert list_shards(["memory://letters/part#{1..2}.jsonl"]).names == names[:2]
    finally:
        memory.rm("/letters", recursive=True)


def test_names_of_addresses_tell_their_files_apart() -> None:
    for one, other in (
        ("s3://b/part#1", "s3://b/part#2"),
        ("gs://b/part?1", "gs://b/part?2"),
        ("abfss://c@a.dfs.core.windows.net/x#1", "abfss://c@a.dfs.core.windows.net/x#2"),
        ("file:///data/a#1", "file:///data/a#2"),
        ("https://h/get?f=a", "https://h/get?f=b"),
        ("https://h/get?page=1&token=S3CRET", "https://h/get?page=2&token=S3CRET"),
        ("/data/a?sig=1#1", "/data/a?sig=1#2"),
    ):
        names = shard_names([one, other], [5, 5])
        assert names == [one.replace("=S3CRET", "=***"), other.replace("=S3CRET", "=***")]


@pytest.mark.parametrize(
    ("address", "values", "sizes"),
    [
        ("https://h/get?blob={}", ("S3CRET1", "S3CRET2"), (5, 5)),  # a parameter that may be anything
        ("https://h/get?blob={}&X-Amz-Signature=$&X-Amz-Date=$", ("S3CRET1", "S3CRET2"), (5, 5)),
        ("https://u:$@h/get?S3CRET{}", ("1", "2"), (5, 5)),
        ("https://a.blob.core.windows.net/c?blob={}&sv=$&se=$&sp=$&sig=$", ("S3CRET1", "S3CRET2"), (5, 5)),
        ("other://h/a#S3CRET{}", ("1", "2"), (5, 5)),
        ("https://h/get?token=$&blob=x", ("", ""), (5, 6)),  # sizes tell that these are two files
        ("s3://b/get?blob={}&sig=$", ("S3CRET1", "S3CRET2"), (5, 5)),
        ("https://h/hf_aS3CRETbS3CRETcS3CRET000{}", ("1", "2"), (5, 5)),  # a path with a form of a token
    ],
)
def test_names_that_would_be_the_same_get_a_mark(address: str, values: tuple[str, str], sizes: tuple[int, int]) -> None:
    """It stays if a signature is made anew, and a name does not change if it is read again."""

    def launch(signature: str) -> list[str]:
        paths = [address.format(value).replace("$", f"{signature}{n}") for n, value in enumerate(values)]
        names = shard_names(paths, sizes)
        assert shard_names(paths[::-1], sizes[::-1]) == names[::-1]
        return names

    names = launch("S3CRETSIG")
    assert names == launch("S3CRETANOTHER") and len(set(names)) == 2 and all("mark=" in name for name in names)
    assert "S3CRET" not in str(names) and shard_names(names, sizes) == names


@pytest.mark.parametrize(
    "paths",
    [
        ("https://h/a.tar?X-Amz-Signature=S3CRET1", "https://h/a.tar?X-Amz-Signature=S3CRET2"),
        ("https://u:S3CRET1@h/a.tar", "https://h/a.tar", "https://v:S3CRET2@h/a.tar"),
        ("https://h/a.tar#S3CRET1", "https://h/a.tar#S3CRET2"),
        ("https://h/a.tar?sv=1&sig=S3CRET1", "https://h/a.tar?sv=2&sig=S3CRET2"),
    ],
)
def test_two_signatures_of_one_file_are_refused(paths: tuple[str, ...]) -> None:
    """To read it twice would be as wrong as to leave one out that is another file."""
    with pytest.raises(ValueError, match=r"differ in user, password or signature alone; expected one") as raised:
        shard_names(paths, [5] * len(paths))
    assert "S3CRET" not in str(raised.value)


def test_names_of_many_shards_take_a_time_in_proportion() -> None:
    def least_time(num: int) -> float:
        paths, times = [f"https://h/get?blob={number}" for number in range(num)], []
        for _ in range(3):
            began = time.process_time()
            assert len(set(shard_names(paths, [5] * num))) == num
            times.append(time.process_time() - began)
        return min(times)

    assert least_time(4000) < 30 * least_time(500)  # 64 if it were quadratic


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["https://h/get?blob=a"], ["https://h/get?blob=b", "https://h/get?blob=a"]),  # a further shard gives marks to both
        (["https://h/get?blob=a&x=1", "https://h/get?blob=b&x=1"], ["https://h/get?blob=b&x=2", "https://h/get?blob=a&x=2"]),
        (["https://h/get?blob=a", "https://h/get?blob=b"], ["https://h/get?blob=b", "https://h/get?blob=c", "https://h/get?blob=a"]),
        (["s3://b/part#1", "s3://b/part#2"], ["s3://b/part#2", "s3://b/part#0", "s3://b/part#1"]),
    ],
)  # fmt: skip
def test_a_run_finds_its_shards_again(before: list[str], now: list[str]) -> None:
    def listed(paths: list[str], size_of: Callable[[str], int]) -> ShardList:
        sizes = [size_of(path) for path in paths]
        return ShardList(*in_their_folder(shard_names(paths, sizes)), tuple(paths), np.array(sizes))

    def size_of(path: str) -> int:
        return 1000 + ord(path.partition("&")[0][-1])

    old = DocumentSource.new("a", listed(before, size_of), lanes=2)
    again = DocumentSource.new("a", listed(now, size_of), lanes=2).resumed(
        old.meta(), old.shards.names, old.shards.sizes, 0
    )
    files = [path.partition("&")[0] for path in again.shards.paths]
    assert files[: len(before)] == [path.partition("&")[0] for path in before]
    assert again.shards.names[: len(before)] == old.shards.names and again.sequence(0)[0].epoch == 0
    with pytest.raises(ValueError, match="it is not there"):
        DocumentSource.new("a", listed(now, lambda path: 5000 + ord(path[-1])), lanes=2).resumed(
            old.meta(), ("gone", *old.shards.names[1:]), old.shards.sizes, 0
        )


def listed(*paths: str, size: int = 5) -> ShardList:
    """The list of addresses, all of one size."""
    paths = tuple(sorted(paths))
    names = shard_names(paths, [size] * len(paths))
    marks = tuple(shard_marks(paths, names))
    return ShardList(*in_their_folder(names), paths, np.array([size] * len(paths)), marks=marks)


def again(before: ShardList, now: ShardList, *, knows_marks: bool = True) -> tuple[tuple[str, ...], list[str]]:
    """The addresses of a run that was saved with the list `before`, over a checkpoint, and the lines about them."""
    if not knows_marks:
        before = before._replace(marks=())
    names, sizes, marks, _ = unpacked(before.packed())
    lines: list[str] = []
    meta = DocumentSource.new("a", before, lanes=2).meta()
    source = DocumentSource.new("a", now, lanes=2).resumed(meta, names, sizes, 0, marks=marks, say=lines.append)
    more = unpacked(source.shards.packed())  # and once more
    same = DocumentSource.new("a", now, lanes=2).resumed(
        source.meta(), *more[:2], 0, marks=more.marks, listed=more.listed, say=lines.append
    )
    assert same.shards.paths == source.shards.paths and same.shards.names == source.shards.names
    return source.shards.paths, lines


GET = "https://h/get?blob={}"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("a", "a"),
        ("b", "ab"),
        ("ab", "ab"),
        ("bc", "abcd"),
        ("b", "abc"),
    ],
)
@pytest.mark.parametrize(
    "url", [GET, "s3://b/get?blob={}&sig=1", "https://u:p@h/x;blob={}/a.jsonl", "https://h/get?{}"]
)
def test_files_are_known_by_what_the_names_hide(url: str, before: str, now: str) -> None:
    """All have one size. Further shards and renewed signatures change nothing."""
    later = url.replace("sig=1", "sig=2").replace("u:p@", "u:other@")
    paths, lines = again(listed(*map(url.format, before)), listed(*map(later.format, now)))
    assert paths[: len(before)] == tuple(map(later.format, before)) and lines == []


@pytest.mark.parametrize(("before", "now"), [("ab", "ac"), ("ab", "a"), ("ab", "bcd"), ("ab", "cd"), ("a", "bc")])
def test_another_file_is_not_taken_for_a_lost_one(before: str, now: str) -> None:
    with pytest.raises(ValueError, match=r"the run has read get\?blob=\*\*\*.* of a in https://h, and it is not there"):
        again(listed(*map(GET.format, before)), listed(*map(GET.format, now)))


@pytest.mark.parametrize(
    ("before", "now", "knows_marks"),
    [
        ([GET.format("a")], [GET.format("z")], True),  # perhaps a signature of an unknown kind
        ([GET.format("a")], [GET.format("a")], False),  # as earlier versions have saved it
        (["https://h/1?ticket=a", "https://h/2?ticket=a"], ["https://h/1?ticket=b", "https://h/2?ticket=b"], True),
    ],
)
def test_a_line_names_the_files_that_are_known_by_name_and_size_alone(
    before: list[str], now: list[str], knows_marks: bool
) -> None:
    paths, (line,) = again(listed(*before), listed(*now), knows_marks=knows_marks)
    assert paths == tuple(now)
    assert all(name in line for name in listed(*now).names) and "known by name and size alone" in line
    with pytest.raises(ValueError, match=r"has 6 bytes now, and had 5|it is not there"):
        again(listed(*before), listed(*now, size=6), knows_marks=knows_marks)


@pytest.mark.parametrize(
    ("before", "now", "num_lines"),
    [
        ("?se=1&foo=1", "?se=1&foo=1", 0),
        ("?se=1&foo=1", "?se=1&foo=2", 1),  # perhaps a signature of an unknown kind
        ("?blob=a&sig=1", "?blob=a&sig=2", 0),
        ("?sig=1", "?sig=2", 0),
        ("", "", 0),
    ],
)
def test_tokenize_goes_on_with_other_hidden_parameters(
    tmp_path: Path, before: str, now: str, num_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a training does, with a line. Folders of earlier versions do not have what the names hide."""

    def begin(query: str, *, knows_marks: bool = True) -> int:
        origin = Origin("data", listed(f"https://h/a.jsonl{query}"))
        OutputFolder(tmp_path, 2).begin({"sources": [origin.fingerprint()]}, [origin.mark()] if knows_marks else [])
        said = capsys.readouterr().err
        assert not said or "known by name and size alone" in said
        return len(said.splitlines())

    assert [begin(query) for query in (before, before, now, now)] == [0, 0, num_lines, 0]
    hides = bool(Origin("data", listed(f"https://h/a.jsonl{now}")).mark())
    (tmp_path / "tokenize.json").unlink()
    assert [begin(now, knows_marks=knows) for knows in (False, True, True)] == [0, hides, 0]


def test_lists_of_earlier_versions_find_a_shard_among_others_by_its_size() -> None:
    names = ("get?blob=***", "get?blob=***&mark=" + listed(GET.format("b")).marks[0])
    now = listed(*map(GET.format, "abc"))._replace(sizes=np.array([5, 6, 7]))
    lines: list[str] = []
    meta = DocumentSource.new("a", listed(GET.format("a")), lanes=2).meta() | {"eras": [[0, 2]]}
    source = DocumentSource.new("a", now, lanes=2).resumed(meta, names, np.array([5, 6]), 0, say=lines.append)
    assert [path[-1] for path in source.shards.paths] == ["a", "b", "c"] and len(lines) == 1
