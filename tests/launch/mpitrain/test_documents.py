"""The main job on shards of documents: the same losses on any number of ranks, and errors that name the shard."""

import json
import math
import re
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from extent import extent
from launching import Result, launch
from main_job import error_line, losses, metrics
from tokenizer_files import byte_pairs

from mpitrain import cli
from mpitrain.job.data.streaming.packing import Packing

pytestmark = pytest.mark.rest

SETTINGS = (
    "--model.width",
    "32",
    "--model.layers",
    "1",
    "--model.heads",
    "2",
    "--model.context",
    "32",
    "--train.batch",
    "6",
)
SETTINGS += ("--train.steps", "16", "--train.sample-bytes", "0", "--train.eval-batches", "2", "--checkpoint.every", "5")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Tar shards with 20 documents each."""
    for shard in range(3):
        with tarfile.open(tmp_path / f"part-{shard}.tar", "w") as file:
            for number in range(20):
                text = f"all work and no play makes document {number} of {shard} dull. ".encode() * (1 + number % 4)
                info = tarfile.TarInfo(f"{shard}-{number:04}.txt")
                info.size = len(text)
                file.addfile(info, BytesIO(text))
    return f"{tmp_path}/part-{{0..2}}.tar"


def train(num_ranks: int, folder: Path, shards: str, *args: str) -> Result:
    words = ["-m", "mpitrain", "--run", str(folder), "--data.path", shards, *SETTINGS, *args]
    return launch(num_ranks, *words, timeout_s=60)


@pytest.mark.parametrize("packing", extent(["whole"], ["cut", "whole"]))
def test_a_run_that_changes_its_number_of_ranks(
    tmp_path: Path, shards: str, packing: Packing, capsys: pytest.CaptureFixture[str]
) -> None:
    file = byte_pairs(tmp_path / "tokenizer.json", ["all work and no play makes document 7 of 1 dull. "] * 3)
    args = ("--data.packing", packing, "--data.heldout", "0.2", "--data.tokenizer", str(file), "--model.vocab", "300")
    args += ("--train.sample-bytes", "4", "--train.sample-prompt", "all work")
    alone = train(1, tmp_path / "alone", shards, *args)
    assert alone.returncode == 0, str(alone)
    for num_ranks, steps in ((3, "7"), (2, "16")):
        result = train(num_ranks, tmp_path / "changing", shards, *args, "--train.steps", steps)
        assert result.returncode == 0, str(result)
    assert losses(tmp_path / "changing") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    padding = [
        [line.get("padding") for line in metrics(tmp_path / run) if "loss" in line] for run in ("alone", "changing")
    ]
    assert padding[0] == padding[1]
    assert all(0 < share < 1 for share in padding[0]) if packing == "whole" else set(padding[0]) == {None}
    nats, bits = (float(found) for found in re.findall(r"held-out (\S+) nats, (\S+) bits per byte", alone.stdout)[0])
    assert bits < 0.7 * nats / math.log(2), "a token is several bytes"
    assert "sample:\nall work" in alone.stdout
    capsys.readouterr()
    assert cli.main(["sample", "--checkpoint", str(tmp_path / "alone"), "--prompt", "no play", "--bytes", "3"]) == 0
    assert capsys.readouterr().out.startswith("no play")


def test_ranks_with_the_same_rows_save_the_place_once(tmp_path: Path, shards: str) -> None:
    args = ("--data.heldout", "0.2")
    alone = train(1, tmp_path / "alone", shards, *args)
    assert alone.returncode == 0 and "data: documents of data: 3 shards, 0.1 MB" in alone.stdout, str(alone)
    pipeline = ("--parallel.pipeline", "2", "--train.accumulate", "2")
    for num_ranks, more in ((2, ("--parallel.tensor", "2", "--train.steps", "7")), (2, pipeline)):
        result = train(num_ranks, tmp_path / "changing", shards, *args, *more)
        assert result.returncode == 0, str(result)
    assert losses(tmp_path / "changing") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_another_run_may_have_other_documents(tmp_path: Path, shards: str) -> None:
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"text": f"other words {n} " * 5}) for n in range(99)))
    first = train(1, tmp_path / "first", shards, "--train.steps", "3", "--data.heldout", "0.2")
    assert first.returncode == 0, str(first)
    words = ("--resume", str(tmp_path / "first/checkpoints/step-00000003"), "--train.steps", "6")
    other = train(2, tmp_path / "other", f"{tmp_path}/other.jsonl", *words)
    assert other.returncode == 0 and "the data begin anew: " in other.stdout, str(other)
    again = train(2, tmp_path / "other", f"{tmp_path}/other.jsonl", "--train.steps", "7")
    assert again.returncode == 0 and "begin anew" not in again.stdout, str(again)
    wrong = train(1, tmp_path / "other", shards, "--train.steps", "8")
    assert "the run has read other.jsonl of data in" in error_line(wrong), str(wrong)


def test_damaged_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "all work and no play " * 9}) for _ in range(30)]
    lines[0] = lines[15] = '{"text": '  # places that lanes come to after some steps
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    few = train(2, tmp_path / "run", f"{tmp_path}/a.jsonl", "--data.heldout", "0")
    said = error_line(few)
    assert "1 damaged document; expected 0 at most; " in said and "--data.max-bad-samples: a.jsonl, the line" in said, (
        str(few)
    )
    assert "data: left out: a.jsonl, the line at byte " in few.stderr, str(few)
    saved = max((tmp_path / "run" / "checkpoints").iterdir())
    num_done = len(losses(tmp_path / "run"))
    assert num_done % 5 and saved.name == f"step-{num_done:08}", "the steps before the damaged document are saved"
    many = train(2, tmp_path / "run", f"{tmp_path}/a.jsonl", "--data.heldout", "0", "--data.max-bad-samples", "1000")
    assert many.returncode == 0 and f"goes on from {saved}" in many.stdout, str(many)


def test_files_of_tokens(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 20_000).astype(np.uint16)
    np.save(tmp_path / "a.npy", tokens[:7000])
    np.save(tmp_path / "b.npy", tokens[7000:])
    for num_ranks in (1, 2):
        result = train(num_ranks, tmp_path / f"on-{num_ranks}", f"{tmp_path}/*.npy", "--model.vocab", "1000")
        assert result.returncode == 0, str(result)
        assert "held-out" in result.stdout and "nats a token" in result.stdout and "bits per byte" not in result.stdout
    assert losses(tmp_path / "on-2") == pytest.approx(losses(tmp_path / "on-1"), rel=1e-5)
