"""Files of tokens by all ranks: the same ones as one process makes, also after an interruption, and errors on all ranks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizer_files import byte_pairs

from collectives import Communicator
from mpitrain.job.config import DataConfig
from mpitrain.job.data import engines
from mpitrain.job.data.engines import Encode
from mpitrain.job.data.loading import load_data, speed_up
from mpitrain.job.data.tokenize import documents
from mpitrain.job.data.tokenize.job import Result, tokenize
from mpitrain.job.data.tokenizers import JsonTokenizer, load_tokenizer
from mpitrain.job.data.tokens import open_tokens

TEXTS = [f"document {number}: all work and no play, " * (number % 9 + 1) for number in range(200)]


@pytest.fixture
def config(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """One large shard and three small ones, in pieces of 4 kB."""
    monkeypatch.setattr(documents, "_LEAST_PIECE_BYTES", 4000)
    if comm.rank == 0:
        lines = [json.dumps({"text": text}) for text in TEXTS]
        for name, begin, end in (("a", 0, 170), ("b", 170, 180), ("c", 180, 190), ("d", 190, 200)):
            (shared_tmp / f"{name}.jsonl").write_text("\n".join(lines[begin:end]))
        byte_pairs(shared_tmp / "tokenizer.json", TEXTS[:9])
    comm.barrier()
    return DataConfig(path=(f"{shared_tmp}/*.jsonl",), tokenizer=str(shared_tmp / "tokenizer.json"))


def tokens_of(folder: Path) -> list[int]:
    """All tokens in the files of a folder."""
    files = sorted(folder.glob("*.bin"))
    found = open_tokens(list(map(str, files)), 0.0).train
    return found.windows(np.array([0]), len(found))[0].tolist()  # type: ignore[no-any-return]


def test_the_tokens_of_all_documents_in_order(config: DataConfig, comm: Communicator, shared_tmp: Path) -> None:
    result = tokenize(config, shared_tmp / "out", comm)
    tokenizer = JsonTokenizer(config.tokenizer)
    expected = np.concatenate([tokenizer.document(text.encode()) for text in TEXTS]).tolist()
    assert tokens_of(shared_tmp / "out") == expected
    size = sum(map(len, TEXTS))
    assert (result.whole.documents, result.whole.tokens, result.whole.text_bytes) == (200, len(expected), size)
    assert result.own == result.whole and result.num_files > 9 and result.dtype == "uint16"
    left = {path.suffix for path in (shared_tmp / "out").iterdir()}
    assert left == {".bin", ".idx", ".json"}, "neither lock nor claims"


@pytest.mark.ranks(2)
def test_one_line_says_what_users_should_know_of_the_shards(
    config: DataConfig, comm: Communicator, shared_tmp: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if comm.rank == 0:
        for number in range(4):
            (shared_tmp / f"{number}.log").write_text('{"text": "a line of many"}\n' * 600)
    comm.barrier()
    tokenize(DataConfig(path=(f"{shared_tmp}/*.log",), tokenizer=config.tokenizer), shared_tmp / "out", comm)
    lines = [line for each in comm.all_gather_object(capfd.readouterr().err) for line in each.splitlines()]
    assert len([line for line in lines if "begins with JSON" in line]) == 1


def test_an_engine_of_a_run(
    config: DataConfig, comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = JsonTokenizer(config.tokenizer)
    encoded: list[bytes] = []

    def equal(json: str) -> Encode:
        return lambda text: encoded.append(text) or slow.encode(text)  # type: ignore[func-returns-value]

    def unequal_in_the_data(json: str) -> Encode:
        return lambda text: slow.encode(text)[: 5 if b"all work and no play" in text else None]

    monkeypatch.setattr(engines, "ENGINES", {"wrong": unequal_in_the_data, "right": equal})
    found = load_data(config, comm, batch=4)
    tokenizer = load_tokenizer(config, vocab=300)
    lines = speed_up(tokenizer, found, config, comm, seed=0)
    assert [line.partition(":")[2][:17] for line in lines] == [" wrong is left ou", " right encodes th"]
    assert tokenizer is not None and np.array_equal(tokenizer.document(b"some text")[:-1], slow.encode(b"some text"))
    assert encoded[-1] == b"some text"
    result = tokenize(config, shared_tmp / "out", comm)
    num_encoded = sum(comm.all_gather_object(sum(text.startswith(b"document ") for text in encoded)))
    assert num_encoded >= result.whole.documents


def test_going_on_after_an_interruption(config: DataConfig, comm: Communicator, shared_tmp: Path) -> None:
    out = shared_tmp / "out"
    tokenize(config, out, comm)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    times = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    comm.barrier()
    if comm.rank == 0:
        (out / "data-000001.json").unlink()  # killed before the last of the files
        for ending in ("bin", "idx", "json"):
            (out / f"data-000003.{ending}").unlink()
        (out / "data-000004.bin").write_bytes(before["data-000004.bin"][:-2])
        (out / "data-000003.bin.part").write_bytes(b"some")
        (out / ".claims").mkdir()
        (out / ".claims/data-000003").touch()
        (out / ".claims/failed").touch()
    comm.barrier()
    result = tokenize(config, out, comm)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    again = {path.name for path in out.glob("*.bin") if path.stat().st_mtime_ns != times[path.name]}
    assert again == {"data-000001.bin", "data-000003.bin", "data-000004.bin"}
    assert result.whole.documents == 200 and 0 < result.own.documents < 200
    assert tokenize(config, out, comm).own.documents == 0


def test_a_folder_of_an_earlier_version(config: DataConfig, comm: Communicator, shared_tmp: Path) -> None:
    """It goes on with what that version would have read, and with nothing else."""
    out = shared_tmp / "out"
    tokenize(config, out, comm)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupted(*lost: str) -> None:
        comm.barrier()
        if comm.rank == 0:
            settings = json.loads((out / "tokenize.json").read_bytes())
            settings.pop("reader", None)
            (out / "tokenize.json").write_text(json.dumps(settings))
            for name in lost:
                (out / f"data-{name}.json").unlink()
        comm.barrier()

    interrupted("000003")
    tokenize(config, out, comm)
    there = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "reader" not in json.loads(there.pop("tokenize.json"))
    assert json.loads(before.pop("tokenize.json"))["reader"] == 2
    assert there == before
    if comm.rank == 0:
        path = shared_tmp / "c.jsonl"
        lines = path.read_bytes().split(b"\n")
        lines[0] = b" " * len(lines[0])
        path.write_bytes(b"\n".join(lines))
    interrupted()
    assert tokenize(config, out, comm).own.documents == 0, "nothing is missing"
    interrupted(*(name[5:-5] for name in there if name.endswith(".json")))
    refused(
        config, out, comm, r"has tokens by an earlier version, which read c.jsonl.* otherwise; choose another --out"
    )
    if comm.rank == 0:
        (shared_tmp / "d.jsonl").rename(shared_tmp / "d.json")
    config = DataConfig(path=(f"{shared_tmp}/?.json*",), tokenizer=config.tokenizer)
    tokenize(config, shared_tmp / "more", comm)
    out = shared_tmp / "more"
    interrupted("000000")
    refused(config, out, comm, r"has tokens by an earlier version, which read d.json otherwise; choose another --out")


def refused(config: DataConfig, out: Path, comm: Communicator, text: str) -> None:
    comm.barrier()
    with pytest.raises(ValueError, match=text):
        tokenize(config, out, comm)
    comm.barrier()


def test_what_is_refused(config: DataConfig, comm: Communicator, shared_tmp: Path) -> None:
    out = shared_tmp / "out"
    refused(DataConfig(path=config.path), out, comm, r"data.tokenizer: expected the path of a tokenizer.json; ")
    if comm.rank == 0:
        byte_pairs(shared_tmp / "other.json", TEXTS[9:20])
        (shared_tmp / "full").mkdir()
        (shared_tmp / "full/notes.txt").touch()
    refused(
        config, shared_tmp / "full", comm, r"expected an empty folder or that of an earlier job, got .* with notes.txt"
    )
    tokenize(config, out, comm)
    comm.barrier()
    other = DataConfig(path=config.path, tokenizer=str(shared_tmp / "other.json"))
    refused(other, out, comm, r"tokens of another job: its tokenizer was tokenizer.json \w+, and is other.json \w+ now")
    if comm.rank == 0:
        shutil.copy(shared_tmp / "a.jsonl", shared_tmp / "e.jsonl")
    refused(config, out, comm, r"tokens of another job: its shards were others; take the same")
    assert not (out / ".lock").exists()


def test_damaged_documents(config: DataConfig, comm: Communicator, shared_tmp: Path) -> None:
    if comm.rank == 0:
        for name in ("a", "d"):
            lines = (shared_tmp / f"{name}.jsonl").read_text().splitlines()
            lines[5] = '{"text": 7}'
            (shared_tmp / f"{name}.jsonl").write_text("\n".join(lines))
    for most in (0, 1):
        of_one = DataConfig(path=config.path, tokenizer=config.tokenizer, max_bad_samples=most)
        text = rf"data: {most + 1} damaged documents?; expected {most} at most; "
        refused(of_one, shared_tmp / "out", comm, text)
    enough = DataConfig(path=config.path, tokenizer=config.tokenizer, max_bad_samples=2)
    result: Result = tokenize(enough, shared_tmp / "out", comm)
    assert (result.whole.documents, result.whole.damaged) == (198, 2)


def test_a_shard_that_a_rank_cannot_read(config: DataConfig, comm: Communicator, shared_tmp: Path) -> None:
    if comm.rank == 0:
        (shared_tmp / "c.parquet").write_bytes(b"all work and no play")
    with_parquet = DataConfig(path=(*config.path, f"{shared_tmp}/*.parquet"), tokenizer=config.tokenizer)
    refused(with_parquet, shared_tmp / "out", comm, r"c.parquet: expected a Parquet file: ")
    assert not list((shared_tmp / "out").glob("*.part"))
