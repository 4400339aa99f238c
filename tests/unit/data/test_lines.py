"""JSON Lines in the forms, and under the names, that other programs give them."""

import gzip
import json
from pathlib import Path

import pytest

from mpitrain.job.config import DataConfig
from mpitrain.job.data import scan
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.documents import DamagedSampleError, DamagedShardError, checked_text, kind_of, open_shard
from mpitrain.job.data.documents.kinds import is_compressed
from mpitrain.job.data.loading import has_documents
from mpitrain.job.data.tokenize.documents import cuts_of, find, pieces_of

MARK = b"\xef\xbb\xbf"
LINES = [b'{"text": "a"}', b'{"id": 1, "text": "b \xc3\xa4"}']
TEXTS = [b"a", b"b \xc3\xa4"]


def texts_of(path: Path, step: int = 1 << 40) -> list[bytes]:
    reader = open_shard(path, path.name, "lines")
    cuts = [reader.cut(begin, begin + step) for begin in range(0, path.stat().st_size, step)]
    keys = [cut.key(index) for cut in cuts for index in range(len(cut))]
    assert len(set(keys)) == len(keys)
    return [checked_text(cut, index) for cut in cuts for index in range(len(cut))]


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n".join([*LINES, b"", b""]),
        b"\r\n\r\n" + b"\r\n\r\n".join(LINES),
        b"\n \t\n".join([*LINES, b"  "]),
        b"\n\t\r\n \n" + LINES[0] + b" \n\n\t" + LINES[1] + b"\t\n",
        MARK + b"\n".join(LINES),
        MARK + b"\r\n" + b"\r\n".join(LINES),
        LINES[0] + b"\n" + MARK + LINES[1] + b"\n" + MARK,
        b"\n" + b"\n".join(b" " + line for line in LINES),
        b"\n".join(
            [
                b" " * 70 + LINES[0],
                b" " * 63,
                b"\t" * 64,
                b" " * 65,
                b"\r" * 500,
                MARK + b" " * 64 + LINES[1],
                MARK + b" " * 99,
            ]
        ),
        b'{"score": NaN, "text": "a"}\n{"text": "b \xc3\xa4", "score": [-Infinity, {"x": Infinity}]}\n',
        b'{"text": "a", "bad": "\\ud800", "more": 1e999}\n{"text": "b \\u00e4", "n": ' + b"9" * 400 + b"}",
    ],
)
def test_forms(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    for step in (1 << 40, 1, 2, 3, 5, 14):
        assert texts_of(path, step) == TEXTS


def test_lines_and_blanks_over_pieces(tmp_path: Path) -> None:
    """The reader takes a MiB at a time."""
    lines = []
    for number in range(3):
        lines += [b'{"text": "%s"}' % (b"%d" % number * (700_000 + number)), b" " * 900_000, b"", b"\n" * 50_000]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    assert texts_of(tmp_path / "a.jsonl") == [b"%d" % number * (700_000 + number) for number in range(3)]


def test_a_line_that_begins_with_blanks_keeps_its_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n  " + LINES[0])
    cut = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines").cut(0, 100)
    assert [cut.key(index) for index in range(len(cut))] == [b"a.jsonl:2"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": NaN}', b'{"score": NaN, "other": "a"}', b'{"score": NaN, "text": 1}', b'{"score": NaN, "text": "\\ud800"}',
        b'[NaN]', b'{"score": nan, "text": "a"}', b'{"score": NaN "text": "a"}', b'{"text": "a", "score": NaN}}', b"\0\0\0", b"\x1a",
        b'{"score": NaN, "text": "\xff"}', b'{"x": NaN, "y": ' + b"[" * 100_000, b'{"text": "a"}\r{"text": "b"}', b"\x0b",
    ],
)  # fmt: skip
def test_what_is_no_json_stays_a_damaged_sample(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES[0] + b"\n" + line + b"\n" + LINES[1])
    cut = open_shard(tmp_path / "a.jsonl", "a.jsonl", "lines").cut(0, 1 << 40)
    assert (len(cut), cut.text(0), cut.text(2)) == (3, *TEXTS)
    with pytest.raises(
        DamagedSampleError, match=r"a.jsonl, the line at byte 14: expected an object with text in 'text'"
    ):
        cut.text(1)


@pytest.mark.parametrize("ending", ["json", "jsonl", "ndjson", "jsonlines", "ldjson", "JSON", "JsonL"])
@pytest.mark.parametrize("packing", ["", ".gz", ".zst", ".GZ"])
def test_names(ending: str, packing: str) -> None:
    name = f"c4-train.00000-of-01024.{ending}{packing}"
    assert kind_of(name) == "lines" and is_compressed(name) == bool(packing)
    assert has_documents(DataConfig(path=(f"/data/{name}",)))
    assert kind_of("of_julia.jl") == "text"
    assert kind_of("A.TAR.GZ") == kind_of("a.TGZ") == "tar" and kind_of("A.Parquet") == "parquet"


def documents(config: DataConfig) -> list[bytes]:
    """All documents of a source, as `tokenize` reads them."""
    (origin,) = find(config)
    opened = origin.opened(ShardCache(config.cache))
    return [
        checked_text(cut, index)
        for piece in pieces_of([origin])
        for cut in cuts_of(piece, opened)
        for index in range(len(cut))
    ]


def test_shards_of_c4_and_dolma(tmp_path: Path) -> None:
    folder = tmp_path / "c4"
    folder.mkdir()
    lines = [json.dumps({"text": f"document {n}", "url": "https://example.org"}) + "\n" for n in range(30)]
    for number in range(3):
        data = gzip.compress("".join(lines[10 * number : 10 * number + 10]).encode())
        (folder / f"c4-train.{number:05}-of-00003.json.gz").write_bytes(data)
    config = DataConfig(path=(f"{folder}/c4-*.json.gz",), cache=str(tmp_path / "cache"))
    assert documents(config) == [b"document %d" % n for n in range(30)]
    with pytest.raises(
        ValueError, match=rf"{folder} is a folder of documents in shards, 3 of 3 files.*'{folder}/\*.json.gz'"
    ):
        find(DataConfig(path=(str(folder),)))


@pytest.mark.parametrize(
    "data", [b'{"text": "a"}\n', MARK + b'\n { "text": "a"}', b'[\n {"text": "a"}]', b'["a", "b"]']
)
def test_json_that_is_taken_as_text_is_told_in_one_line(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("part-0", "part-1", "a.txt"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    assert documents(DataConfig(path=(f"{tmp_path}/*.gz",), cache=str(tmp_path / "cache"))) == 3 * [data]
    (line,) = capsys.readouterr().err.splitlines()
    assert "data: a.txt.gz is taken as text, and begins with JSON; files of JSON Lines have the ending" in line
    (tmp_path / "b.log").write_bytes(data)
    assert documents(DataConfig(path=(f"{tmp_path}/b.log",))) == [data]  # text of its own, not shards
    (line,) = capsys.readouterr().err.splitlines()
    assert f"data: 1 file of text begins with JSON, the first one {tmp_path}/b.log" in line


def test_json_of_windows_is_told_too(tmp_path: Path) -> None:
    """Of text that is named, bytes are tokens, also those of UTF-16."""
    (tmp_path / "a.txt").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    (remark,) = scan([f"{tmp_path}/a.txt"]).remarks
    assert remark.startswith(f"1 file of text begins with JSON, the first one {tmp_path}/a.txt;")


@pytest.mark.parametrize(
    "data", [b"[1] Smith", b"{{template}} of a wiki", b"[[link]]", b"{a, b}", b"a {", b"(", b"\xef\xbb\xbftext"]
)
def test_text_that_is_no_json(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert open_shard(tmp_path / "a.txt", "a.txt", "text").remark == ""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(b"text"), "compressed by gzip"),
        (b"\xfd7zXZ\0\0\4", "compressed by xz"),
        (b"BZh91AY&SY\1", "compressed by bzip2"),
        (b"PAR1abc", "a Parquet file"),
        (b"name".ljust(257, b"\0") + b"ustar\x0000".ljust(255, b"\0"), "a tar file"),
    ],
)
def test_other_formats_are_not_taken_as_text(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "part-0").write_bytes(data)
    with pytest.raises(DamagedShardError, match=f"^part-0: expected text, got a file that is {words}"):
        open_shard(tmp_path / "part-0", "part-0", "text")
    for kind, own in (("tar", "a tar file"), ("lines", "JSON Lines"), ("parquet", "a Parquet file")):
        with pytest.raises(DamagedShardError) as caught:
            open_shard(tmp_path / "part-0", "part-0", kind)
        is_other = f"part-0: expected {own}, got a file that is {words}" in str(caught.value)
        assert is_other != words.startswith(own), caught.value
    with pytest.raises(ValueError, match=f"data.path: expected text, got {tmp_path}/part-0, which is {words}"):
        find(DataConfig(path=(f"{tmp_path}/part-0",)))
