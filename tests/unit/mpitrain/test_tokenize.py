"""The pieces of documents, and the training of a tokenizer on them, in one process."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from mpitrain.job.config import DataConfig, SourceConfig
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.documents import checked_text
from mpitrain.job.data.tokenize.documents import cuts_of, find, pieces_of
from mpitrain.job.data.tokenize.tokenize_command import train_tokenizer
from mpitrain.job.data.tokenize.training import train
from mpitrain.job.data.tokenizers import JsonTokenizer

TEXTS = [f"document {number}: all work and no play, " * (number % 5 + 1) for number in range(60)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """A large tar file, many small shards of lines, and a compressed one: 20 documents each."""
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for number, text in enumerate(TEXTS[:20]):
            info = tarfile.TarInfo(f"{number:03}.txt")
            info.size = len(text)
            file.addfile(info, io.BytesIO(text.encode()))
    for number, text in enumerate(TEXTS[20:40]):
        (tmp_path / f"b-{number:02}.jsonl").write_text(json.dumps({"text": text}))
    lines = "\n".join(json.dumps({"content": text}) for text in TEXTS[40:])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    sources = (
        SourceConfig("first", (f"{tmp_path}/a.tar", f"{tmp_path}/b-*.jsonl")),
        SourceConfig("last", (f"{tmp_path}/c.jsonl.gz",), field="content"),
    )
    return DataConfig(sources=sources, cache=str(tmp_path / "cache"))


@pytest.mark.rest
@pytest.mark.parametrize("piece_bytes", [1, 600, 2000, 10**6, None])
def test_pieces_have_each_document_once(config: DataConfig, piece_bytes: int | None) -> None:
    origins = find(config)
    pieces = pieces_of(origins, piece_bytes)
    opened = [origin.opened(ShardCache(config.cache)) for origin in origins]
    texts = [
        checked_text(cut, index).decode()
        for piece in pieces
        for cut in cuts_of(piece, opened[piece.origin])
        for index in range(len(cut))
    ]
    assert texts == TEXTS
    assert sum(piece.num_bytes for piece in pieces) == sum(int(origin.shards.sizes.sum()) for origin in origins)
    assert len({piece.name for piece in pieces}) == len(pieces) and pieces[-1].name == "last-000000"
    if piece_bytes == 2000:
        most = max(len(piece.parts) for piece in pieces)
        assert most > 5 and sum(piece.parts[0].shard == 0 for piece in pieces) > 5, (
            "small shards together, a large one in parts"
        )


def test_text_files_are_documents_whatever_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.jsonl", "c.gz"):
        (folder / name).write_text(f"the text of {name}")
    (origin,) = find(DataConfig(path=(str(folder),)))
    opened = origin.opened(ShardCache(tmp_path))
    (piece,) = pieces_of([origin])
    assert [cut.text(0) for cut in cuts_of(piece, opened)] == [
        b"the text of a.txt",
        b"the text of b.jsonl",
        b"the text of c.gz",
    ]


def test_training_a_tokenizer(config: DataConfig, tmp_path: Path) -> None:
    said: list[str] = []
    made = train(config, tmp_path / "a.json", num_tokens=300, most_bytes=10**9, seed=0, say=said.append)
    assert isinstance(made, JsonTokenizer) and made.num_tokens == 300 and made.separator == 0
    assert "read 60 documents" in said[-1]
    text = TEXTS[7].encode() + "Straße 世界 \x00\U0001f600".encode()
    assert made.decode(made.encode(text)) == text and len(made.encode(TEXTS[7].encode())) < len(TEXTS[7]) / 3
    train(config, tmp_path / "b.json", num_tokens=300, most_bytes=10**9, seed=0, say=said.append)
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()
    train(config, tmp_path / "c.json", num_tokens=300, most_bytes=500, seed=0, say=said.append)
    assert int(said[-1].split("read ")[1].split()[0]) < 20


def test_what_training_refuses(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "damaged.jsonl").write_text('{"text": "a"}\n{"text": \n{}\n')
    words = ["train", "--data.path", f"{tmp_path}/damaged.jsonl", "--out"]
    for arguments, text in (
        ([*words, f"{tmp_path}/tokenizer.json"], r"tokenizer.json exists, and runs may need it; choose another --out"),
        ([*words, f"{tmp_path}/a.json", "--vocab-size", "256"], r"--vocab-size: expected at least 257, got 256"),
        ([*words, f"{tmp_path}/a.json"], r"1 damaged document; expected 0 at most"),
        ([*words, f"{tmp_path}/a.json", "--data.max-bad-samples", "1"], r"2 damaged documents; expected 1 at most"),
        (
            ["train", "--data.path", "a.bin"],
            r"data.path: expected text or shards of documents, got files of tokens: a.bin",
        ),
        (["train", "--vocab-size"], r"tokenizer train: argument --vocab-size: expected one argument"),
        (["rain"], r"tokenizer: expected train, got rain"),
    ):
        with pytest.raises(ValueError, match=text):
            train_tokenizer(arguments)
    assert not (tmp_path / "a.json").exists() and not (tmp_path / "a.json.part").exists()
    train_tokenizer([*words, f"{tmp_path}/a.json", "--data.max-bad-samples", "2"])
    assert JsonTokenizer(tmp_path / "a.json").num_tokens == 257


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "-h", "--vocab-size", "x"]])
def test_help_trains_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        train_tokenizer(words)
    assert ended.value.code == 0 and "--vocab-size N " in capsys.readouterr().out and not list(tmp_path.iterdir())
