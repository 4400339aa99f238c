"""`python -m mpitrain bench data`, with few and short documents."""

import json
from pathlib import Path

import pytest

from benchmarks.data import data_command, samples, waiting
from benchmarks.data.readers import READERS
from mpitrain.cli import main

OURS = [name for name, reader in READERS.items() if name.startswith("mpitrain")]


@pytest.mark.parametrize("name", OURS)
def test_each_reader_gives_all_documents(tmp_path: Path, name: str) -> None:
    shards = samples.dealt(200, 40_000)
    documents = [document for shard in shards for document in shard]
    assert len(shards) == samples.NUM_SHARDS and 100 < len(documents) < 400
    READERS[name].write(tmp_path, shards)
    assert list(READERS[name].read(tmp_path, False)) == documents
    shuffled = list(READERS[name].read(tmp_path, True))
    assert shuffled != documents and sorted(shuffled) == sorted(documents)


@pytest.mark.rest
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(data_command, "_TOTAL_BYTES", {1_000: 50_000})
    monkeypatch.setattr(data_command, "_WAITING_BYTES", 400_000)
    monkeypatch.setattr(data_command, "_RESUME_BYTES", 400_000)
    monkeypatch.setattr(waiting, "STEP_S", 0.002)
    monkeypatch.setattr(waiting, "START_S", 0.0)
    rows = tmp_path / "rows.jsonl"
    assert main(["bench", "data", "--rounds", "1", "--steps", "5", "--json", str(rows), "--folder", str(tmp_path)]) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    out = capsys.readouterr().out
    assert {row["part"] for row in found} == {"reading", "waiting", "resume"}
    for name in (*OURS, "documents, tokenized ahead, bytes", "token file, bytes", "| tar |"):
        assert name in out
    assert "webdataset tar has no row: webdataset is not installed" in out
    assert not list(tmp_path.glob("mpitrain-data.*")), "the documents are removed"
    assert main(["bench", "data", "--tokenizer", "/nowhere.json", "--only", "waiting"]) == 1
    assert "data.tokenizer: /nowhere.json cannot be read" in capsys.readouterr().err
