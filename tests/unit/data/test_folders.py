"""Folders of text: links that lead out of them, shards of documents in them, and what is told of both."""

import bz2
import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.job.data import folders, read_into, scan
from mpitrain.job.data.corpus import Listing, Part


def text_of(listing: Listing) -> bytes:
    return text_of_part(listing.train)


def text_of_part(part: Part) -> bytes:
    buffer = np.empty(part.num_tokens, np.uint8)
    read_into(part, buffer)
    return buffer.tobytes()


def scanned(folder: Path, *suffixes: str, follow_links: bool = False) -> Listing:
    return scan([str(folder)], suffixes, heldout=0, follow_links=follow_links)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two files, beside a secret."""
    (tmp_path / "secret").write_text("root:$6$")
    (tmp_path / "data/inner").mkdir(parents=True)
    (tmp_path / "data/a.txt").write_text("aaa")
    (tmp_path / "data/inner/b.txt").write_text("bb")
    return tmp_path / "data"


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "inner/../../secret", "x.txt"])
def test_links_out_of_the_folder(folder: Path, target: str) -> None:
    """Also absolute ones, through a folder of it, and through another link."""
    os.symlink("../secret", folder / "x.txt")
    os.symlink(target, folder / "c.txt")
    os.symlink("../../secret", folder / "inner/.hidden")
    for suffixes in ((), (".txt",)):
        with pytest.raises(ValueError) as caught:
            scanned(folder, *suffixes)
        real = os.path.realpath(folder / "c.txt")
        assert f"{folder} has 2 links out of the folder, the first one {folder}/c.txt, which leads to {real}" in str(
            caught.value
        )
        assert "--data.follow-links true" in str(caught.value) and "\n" not in str(caught.value)
    assert text_of(scanned(folder, ".md", ".txt", follow_links=True)).startswith(b"aaa\0")
    with pytest.raises(ValueError, match="found none"):
        scanned(folder, ".md")
    assert b"root" in text_of(scanned(folder, follow_links=True))


def test_names_of_a_stranger_are_shown_as_text(folder: Path) -> None:
    os.symlink("../secret", folder / "\x1b[31m\n.txt")
    with pytest.raises(ValueError) as caught:
        scanned(folder)
    assert str(caught.value).isprintable() and f"{folder}/\\x1b[31m\\n.txt" in str(caught.value)


def test_links_that_stay_in_the_folder(folder: Path, tmp_path: Path) -> None:
    """Each name is a file. What several paths name alike is one."""
    os.symlink("inner/b.txt", folder / "c.txt")
    os.symlink(folder / "a.txt", folder / "inner/d.txt")
    os.symlink("data", tmp_path / "other")  # the folder may be a link itself
    for root in (folder, tmp_path / "other", tmp_path / "data/inner/.."):
        listing = scanned(root)
        assert text_of(listing) == b"aaa\0bb\0bb\0aaa\0" and listing.remarks == ()
    again = scan([str(each) for each in (folder, tmp_path / "other/inner/d.txt", tmp_path / "other")], heldout=0)
    assert text_of(again) == b"aaa\0bb\0bb\0aaa\0"


@pytest.mark.parametrize("num_files", [7, 60])
@pytest.mark.parametrize("has_files", [True, False])
def test_a_link_is_on_the_side_of_its_file(tmp_path: Path, num_files: int, has_files: bool) -> None:
    """Also if two links lead to a file that is not listed itself. The side of a file is that of a folder without links."""
    for name in ("data", "plain", "elsewhere"):
        (tmp_path / name).mkdir()
    files = tmp_path / ("data" if has_files else "elsewhere")
    for n in range(num_files):
        text = f"{n:05}\n" * 20
        (files / f"{n}.txt").write_text(text)
        (tmp_path / f"plain/{n}.txt").write_text(text)
        for link in (f"{n}.txt", f"other {n}.txt")[has_files:]:
            (tmp_path / "data" / link).symlink_to(files / f"{n}.txt")
    listing = scan([str(tmp_path / "data")], heldout=0.35, follow_links=True)
    plain = scan([str(tmp_path / "plain")], heldout=0.35)
    for part, its in ((listing.train, plain.train), (listing.heldout, plain.heldout)):
        assert len(part.pieces) == 2 * len(its.pieces) > 0
        assert set(text_of_part(part).split(b"\0")) == set(text_of_part(its).split(b"\0"))
    (tmp_path / "data/other 0.txt").unlink()
    (tmp_path / "data/other 0.txt").write_text("00000\n" * 20)
    assert scan([str(tmp_path / "data")], heldout=0.35, follow_links=True).fingerprint != listing.fingerprint


def test_the_standard_library_has_each_file_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Python of Debian has links in it, other ones have not."""
    (tmp_path / "b.py").write_text("pass\n")
    (tmp_path / "a.py").symlink_to("b.py")
    monkeypatch.setattr("mpitrain.job.data.corpus._STDLIB", str(tmp_path))
    (piece,) = scan((), heldout=0).train.pieces
    assert piece.name == "a.py"


def test_the_cache_of_the_hugging_face_hub(tmp_path: Path) -> None:
    repository = tmp_path / "hub/datasets--stranger--texts"
    for name in ("blobs", "snapshots/0123/en"):
        (repository / name).mkdir(parents=True)
    (repository / "blobs/aa").write_text("of the hub")
    (repository / "blobs/bb").write_text("in a folder")
    os.symlink("../../blobs/aa", repository / "snapshots/0123/equal.txt")  # the cache keeps equal files once
    os.symlink("../../blobs/aa", repository / "snapshots/0123/a.txt")
    os.symlink("../../../blobs/bb", repository / "snapshots/0123/en/b.txt")
    assert text_of(scanned(repository / "snapshots/0123")) == b"of the hub\0in a folder\0of the hub\0"
    assert text_of(scanned(repository / "snapshots/0123/en")) == b"in a folder\0"
    (tmp_path / "secret").write_text("root")
    os.symlink(tmp_path / "secret", repository / "blobs/cc")
    os.symlink("../../blobs/cc", repository / "snapshots/0123/c.txt")
    with pytest.raises(
        ValueError, match=r"1 link out of the folder, the first one .*/c.txt, which leads to .*/secret;"
    ):
        scanned(repository / "snapshots/0123")
    (repository / "snapshots/0123/c.txt").unlink()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/aa").write_text("of another folder")
    os.symlink(tmp_path / "blobs/aa", repository / "snapshots/0123/d.txt")
    with pytest.raises(ValueError, match=r"1 link out of the folder, the first one .*/d.txt"):
        scanned(repository / "snapshots/0123")


def test_links_that_are_not_followed_are_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more/z.txt").write_text("z")
    os.symlink("../more", folder / "more")
    os.symlink("gone.txt", folder / "e.txt")
    os.symlink("f.txt", folder / "f.txt")
    os.symlink("/dev/zero", folder / "g.txt")
    os.mkfifo(folder / "pipe.txt")
    listing = scanned(folder)
    assert text_of(listing) == b"aaa\0bb\0"
    dead, folders, others = listing.remarks
    assert f"{folder} has 1 file of other formats than text, left out, the first one pipe.txt" in others
    assert scanned(folder, ".txt").remarks[-1] == others
    assert f"{folder} has 3 links to no file, the first one {folder}/e.txt" in dead
    assert f"{folder} has 1 link to a folder, not followed, the first one {folder}/more" in folders


def test_shards_in_a_folder(folder: Path) -> None:
    """Those beside more text are told; a folder of shards is an error that names them."""
    (folder / "big.md").write_text("x" * 5000)
    (folder / "inner/c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}'))
    (folder / "d.jsonl").write_text('{"text": "d"}\n' * 3)
    (folder / "package.json").write_text('{\n  "name": "p"\n}\n')
    listing = scanned(folder)
    left_out, as_text = listing.remarks
    assert f"{folder} has 1 shard of documents, left out, the first one inner/c.jsonl.gz" in left_out
    assert f"'{folder}/**/*.jsonl.gz'" in left_out
    assert f"{folder} has 1 file of JSON Lines, read as text, the first one d.jsonl" in as_text
    assert f"'{folder}/*.jsonl'" in as_text
    assert text_of(listing).count(b"\0") == 5 and b'{"text": "d"}' in text_of(listing)
    (folder / "d.jsonl").write_text('{"text": "d"}\n' * 500)
    with pytest.raises(
        ValueError,
        match=rf"is a folder of documents in shards, 2 of 6 files, the first one d.jsonl; .*'{folder}/\*\.jsonl'",
    ):
        scanned(folder)
    assert text_of(scanned(folder, ".jsonl")) == b'{"text": "d"}\n' * 500 + b"\0"


@pytest.mark.parametrize(
    "data",
    [
        b'{"button": {"text": "OK"}, "words": ["' + b"text, " * 2000 + b'"]}',
        b'{"type":"FeatureCollection","features":[' + b'{"text":"a place"},' * 500 + b"{}]}",
        b'{"name": "text", "a \\" {": 1}\n' + b" " * 9000,
        b'{"n": 1}\n["' + b"x" * 9000 + b'"]',
    ],
)
def test_files_in_json_of_programs_are_text(folder: Path, data: bytes) -> None:
    (folder / "inner/en.json").write_bytes(data)
    listing = scanned(folder)
    assert len(listing.train.pieces) == 3
    assert listing.remarks[0].startswith(f"1 file of text begins with JSON, the first one {folder}/inner/en.json")
    (folder / "c.md").write_text("x" * 20_000)
    assert scanned(folder).remarks == ()


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b'{"id": 1}\n{"id": 2}\n', None),
        (b'\xef\xbb\xbf{"id": [{"text": 1}], "text" : "one"}', None),
        (b'{"id": {"a \\" {": 1}, "text": "' + b"x" * 9000 + b'"}\n', None),
        (b'{"id": 1, "content": "one"}\n', "content"),
    ],
)
def test_json_lines_with_the_ending_json_are_documents(folder: Path, data: bytes, field: str | None) -> None:
    (folder / "inner/a.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"1 of 3 files, the first one inner/a\.json;"):
        scan([str(folder)], field=field)


def test_other_formats_are_told(folder: Path) -> None:
    """They are no shards, however large: a compressed file in the folder of a program may be anything."""
    (folder / "inner/mnist-ubyte.gz").write_bytes(gzip.compress(os.urandom(50_000)))
    (folder / "p.jsonl.bz2").write_bytes(bz2.compress(b'{"text": "p"}\n'))
    (folder / "d.zip").write_bytes(b"PK\3\4" + bytes(100))
    (folder / "data-0.arrow").write_bytes(b"\xff" * 4 + b"x" * 5000)
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n" + bytes(100))
    (folder / "windows.json").write_text("{}" * 9000, "utf-16")
    (folder / "c.txt").write_text("of Windows", "utf-16")
    (folder / "inner/d.txt").write_text("of Windows", "utf-32")
    listing = scanned(folder)
    assert text_of(listing) == b"aaa\0bb\0"
    told = f"{folder} has 8 files of other formats than text, left out, the first one c.txt"
    assert listing.remarks == (told,)
    for name in ("a.txt", "inner/b.txt"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=f"text files that are not empty, found none in {folder}; {told}"):
        scanned(folder)


@pytest.mark.parametrize("function", ["lstat", "open"])
@pytest.mark.parametrize("suffixes", [(), (".txt",)])
def test_a_file_that_vanishes_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str, suffixes: tuple[str, ...]
) -> None:
    whole = {"lstat": os.lstat, "open": open}[function]

    def late(path: Path | str, *words: Any) -> Any:
        if str(path).endswith("a.txt"):
            (folder / "a.txt").unlink(missing_ok=True)
        return whole(path, *words)

    monkeypatch.setattr(os if function == "lstat" else folders, function, late, raising=False)
    assert text_of(scanned(folder, *suffixes)) == b"bb\0" and not (folder / "a.txt").exists()
