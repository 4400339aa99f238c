"""From documents to a trained model: a tokenizer, files of tokens by a job that is killed once, and a run on them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, launch, run
from main_job import error_line, losses

pytestmark = pytest.mark.rest

WORDS = sorted({word for line in Path(__file__).read_text().splitlines() for word in line.split()})


def documents(path: Path, num_bytes: int) -> int:
    """Write documents of words of this file, and numbers. Returns how many."""
    num = 0
    with path.open("w") as file:
        while file.tell() < num_bytes:
            at = file.tell()
            text = " ".join(f"{WORDS[at * number % len(WORDS)]} {at + number}" for number in range(1, 200))
            file.write(json.dumps({"text": text}) + "\n")
            num += 1
    return num


ENGINE = """
import time, numpy, tokenizers

class Tokenizer:
    @classmethod
    def from_json_str(cls, json):
        made = cls()
        made.of_json = tokenizers.Tokenizer.from_str(json)
        return made

    def encode_batch_flat(self, texts):
        time.sleep(PAUSE_S)
        ids = self.of_json.encode(texts[0], add_special_tokens=False).ids[FIRST:]
        return numpy.array(ids, "<u4").tobytes(), numpy.array([0, len(ids)], "<u8").tobytes()
"""


def engine(folder: Path, *, first: int, pause_s: float) -> dict[str, str]:
    """The environment of a job with a library fastokens that takes its time, and gives the tokens from the first one on."""
    folder.mkdir()
    (folder / "fastokens.py").write_text(ENGINE + f"\nFIRST, PAUSE_S = {first}, {pause_s}\n")
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def test_from_documents_to_a_run(tmp_path: Path) -> None:
    num = documents(tmp_path / "a.jsonl", 4_000_000)
    shards, out, tokenizer = f"{tmp_path}/*.jsonl", tmp_path / "tokens", str(tmp_path / "made/tokenizer.json")
    made = run(
        [sys.executable, "-m", "mpitrain", "tokenizer", "train", "--data.path", shards, "--out", tokenizer]
        + ["--vocab-size", "400", "--bytes", "500000"],
        cwd=ROOT,
    )
    assert (
        made.returncode == 0 and f"tokenizer.json: 400 tokens; use it with --data.tokenizer {tokenizer} " in made.stdout
    )

    command = ["-m", "mpitrain", "tokenize", "--data.path", shards, "--data.tokenizer", tokenizer, "--out", str(out)]

    def kill(pid: int) -> None:
        until = time.monotonic() + 30
        while not list(out.glob("data-*.json")) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    killed = launch(2, *command, env=engine(tmp_path / "slow", first=0, pause_s=0.002), during=kill)  # 1 s a piece
    complete = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert "tokenizer: fastokens encodes the documents" in killed.stdout
    assert killed.returncode != 0 and 1 <= len(complete) < 4, str(killed)
    resumed = launch(2, *command, env=engine(tmp_path / "wrong", first=1, pause_s=0))
    assert resumed.stdout.count("tokenizer: fastokens is left out: its tokens differ from those of ") == 1, str(resumed)
    assert resumed.returncode == 0 and "pieces are complete; " in resumed.stdout, str(resumed)
    assert "train on them: --data.path " in resumed.stdout and " tokens (uint16) in 4 files, " in resumed.stdout
    assert all(path.stat().st_mtime_ns == at for path, at in complete.items() if path.with_suffix(".json").exists())
    assert f"{num:,} documents, " in resumed.stdout
    assert {path.suffix for path in out.iterdir()} == {".bin", ".idx", ".json"}

    other = launch(2, *command, "--data.separator", "a")
    assert "has tokens of another job: its separator was 0, and is " in error_line(other), str(other)
    words = ("--data.path", f"{out}/*.bin", "--data.tokenizer", tokenizer, "--model.vocab", "400", "--train.steps", "2")
    words += ("--train.eval-batches", "1", "--train.sample-bytes", "2", "--run", str(tmp_path / "run"))
    trained = launch(2, "-m", "mpitrain", *words)
    assert trained.returncode == 0 and "4 files of tokens" in trained.stdout, str(trained)
    assert "bits per byte" in trained.stdout and len(losses(tmp_path / "run")) == 2
