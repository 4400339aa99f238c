"""Batches of documents on real ranks: the global batches of one process, also over a state that other ranks have saved."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from two_sources import two_sources

import ckpt
from collectives import Communicator
from mpitrain.job.config import Config, parse
from mpitrain.job.data.loading import DocumentSources, load_data
from mpitrain.job.data.streaming.packing import Packing
from mpitrain.job.train.batches.rank_batches import RankBatches

STEPS = 6


@pytest.fixture
def settings(comm: Communicator, shared_tmp: Path) -> Config:
    """Two sources, with a split by the documents' keys."""
    sources = two_sources(comm, shared_tmp)
    small = ["--model.context", "24", "--train.batch", "7", "--train.accumulate", "1", "--train.eval-batches", "2"]
    small += ["--data.processes", "0"]
    return parse(["--config", str(sources), "--train.elastic", "true", "--data.heldout", "0.2", *small])


def batches(config: Config, comm: Communicator) -> RankBatches:
    return RankBatches(config, load_data(config.data, comm, batch=config.train.batch), comm)


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_the_documents_and_the_padding_of_rows(settings: Config, comm: Communicator, packing: Packing) -> None:
    """By their bytes: a zero byte ends each document, and padding is more zero bytes."""
    data = replace(settings.data, packing=packing)
    (batch,) = batches(replace(settings, data=data), comm).of_step(0)
    ends = F.pad(batch.tokens, (1, 0))[:, :-1] == 0  # the token before
    is_padding = ends & (batch.tokens == 0)
    assert batch.segments is not None
    firsts = batch.segments.positions == 0
    assert torch.equal(firsts & ~is_padding, ends & ~is_padding)
    num_paddings = is_padding.any(1).sum()  # each row has its padding in one piece
    assert len(batch.segments.lengths) == firsts.sum() == (ends & ~is_padding).sum() + num_paddings
    assert sum(batch.segments.lengths) == batch.tokens.numel()
    assert batch.num_padding == is_padding.sum()
    assert (sum(comm.all_gather_object(batch.num_padding)) > 0) == (packing == "whole")
    (plain,) = batches(replace(settings, data=replace(data, mask_documents=False)), comm).of_step(0)
    assert plain.segments is None and plain.num_padding == batch.num_padding
    assert torch.equal(plain.tokens, batch.tokens) and torch.equal(plain.targets, batch.targets)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("processes", ["0", "1"])
def test_one_line_of_a_job_says_what_users_should_know_of_the_shards(
    comm: Communicator, shared_tmp: Path, capfd: pytest.CaptureFixture[str], processes: str
) -> None:
    """For each source, over training, evaluation and a second start of the processes; not one of each rank or process."""
    if comm.rank == 0:
        for number in range(4):
            (shared_tmp / f"{number}.log").write_text('{"text": "a line of many"}\n' * 60)
    comm.barrier()
    words = ["--data.path", f"{shared_tmp}/*.log", "--data.heldout", "0.4", "--data.processes", processes]
    words += ["--model.context", "24", "--train.batch", "4", "--train.eval-batches", "1"]
    mine = batches(parse(words), comm)
    for step in range(2):
        mine.of_step(step)
    mine.of_evaluation(0)
    lines = [line for each in comm.all_gather_object(capfd.readouterr().err) for line in each.splitlines()]
    (said,) = [line for line in lines if "begins with JSON" in line]
    assert said.startswith("data: ") and said.endswith("(further shards are not named)")


def whole(of_rank: np.ndarray, comm: Communicator) -> np.ndarray:
    return np.concatenate(comm.all_gather_object(of_rank))


def alone(config: Config, comm: Communicator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The training and evaluation batches of one process, on each rank."""
    itself = comm.split(comm.rank)
    mine = batches(config, itself)
    train = [mine.of_step(step)[0].tokens.numpy() for step in range(STEPS)]
    heldout = [mine.of_evaluation(index)[0].tokens.numpy() for index in range(2)]
    itself.free()
    return train, heldout


def test_ranks_share_the_batches_of_one_process(settings: Config, comm: Communicator) -> None:
    train, heldout = alone(settings, comm)
    mine = batches(replace(settings, data=replace(settings.data, processes=1)), comm)
    for step in range(STEPS):
        parts = mine.of_step(step)
        mine.prepare(step + 1)
        assert np.array_equal(whole(parts[0].tokens.numpy(), comm), train[step]), step
    for index in (0, 1, 0):
        assert np.array_equal(whole(mine.of_evaluation(index)[0].tokens.numpy(), comm), heldout[index])
    mine.close()
    text = b"".join(batch.astype(np.uint8).tobytes() for batch in train)
    assert b" of a" in text and b" of b" in text


def test_a_saved_state_goes_on(settings: Config, comm: Communicator, shared_tmp: Path) -> None:
    """After each step from a checkpoint, and in the end on one rank alone."""
    train, _ = alone(settings, comm)
    mine = batches(settings, comm)
    for step in range(STEPS):
        assert np.array_equal(whole(mine.of_step(step)[0].tokens.numpy(), comm), train[step]), step
        if step % 2:
            mine.prepare(step + 1)  # the state is that before what was read ahead
        meta, tensors = mine.state(step + 1)
        sample = mine.train.next_sample(step + 1)
        ckpt.save(shared_tmp / "state", tensors, comm=comm, meta=meta, overwrite=True)
        mine = resumed(settings, comm, shared_tmp / "state", step + 1, sample)
    itself = comm.split(comm.rank)
    last = resumed(settings, itself, shared_tmp / "state", STEPS, sample)
    expected = batches(settings, itself)
    assert np.array_equal(last.of_step(STEPS)[0].tokens, expected.of_step(STEPS)[0].tokens)
    itself.free()


def resumed(config: Config, comm: Communicator, path: Path, step: int, sample: int) -> RankBatches:
    made = batches(config, comm)
    meta = ckpt.open(path).meta
    room = made.room(meta)
    ckpt.load(path, room, comm=comm)
    made.load(step, sample, meta, room)
    return made


def test_shards_that_came_and_went(settings: Config, comm: Communicator, shared_tmp: Path) -> None:
    toml = shared_tmp / "run.toml"
    words = ["--config", str(toml), "--data.heldout", "0", "--train.elastic", "true"]
    words += ["--data.processes", "0", "--model.context", "24", "--train.batch", "7", "--train.eval-batches", "0"]
    mine = batches(parse(words), comm)
    mine.of_step(0)
    meta, tensors = mine.state(1)
    ckpt.save(shared_tmp / "state", tensors, comm=comm, meta=meta)
    if comm.rank == 0:
        shutil.copy(shared_tmp / "a.jsonl", shared_tmp / "b2.jsonl")
        toml.write_text(toml.read_text().replace("b.jsonl", "b*.jsonl"))
    comm.barrier()
    longer = parse(words)
    more = resumed(longer, comm, shared_tmp / "state", 1, 7)
    eras = more.state(1)[0]["sources"][1]["eras"]
    assert eras[0] == [0, 1] and eras[1][0] >= 1 and eras[1][1] == 2
    assert np.array_equal(whole(more.of_step(1)[0].tokens, comm), whole(mine.of_step(1)[0].tokens, comm))
    comm.barrier()
    if comm.rank == 0:
        (shared_tmp / "other").write_text("{}\n")
        (shared_tmp / "other").replace(shared_tmp / "a.jsonl")
    comm.barrier()
    with pytest.raises(ValueError, match=r"the run has read a.jsonl of a in .*, and it has 3 bytes now, and had \d+"):
        resumed(longer, comm, shared_tmp / "state", 1, 7)


@pytest.mark.ranks(2)
def test_no_document_is_trained_on_and_held_out_after_names_have_changed(comm: Communicator, shared_tmp: Path) -> None:
    """A further folder makes names longer, and the split follows from the names. A run that begins anew has the new ones."""
    if comm.rank == 0:
        for shard in ("x/0", "x/1", "y/2"):
            (shared_tmp / shard[0]).mkdir(exist_ok=True)
            lines = [json.dumps({"text": f"{shard}:{number:04}:{'a' * 40}"}) for number in range(300)]
            (shared_tmp / f"{shard}.jsonl").write_text("\n".join(lines))
    comm.barrier()
    words = ["--data.heldout", "0.5", "--train.elastic", "true", "--data.processes", "0", "--data.packing", "whole"]
    words += ["--model.context", "24", "--train.batch", "4", "--train.eval-batches", "60", "--data.path"]

    def texts(batch: np.ndarray) -> set[bytes]:
        """The begins of the documents in rows of whole or cut documents."""
        return {text[:8] for row in batch.astype(np.uint8) for text in row.tobytes().split(b"\0") if b":" in text[:4]}

    def seen(of: RankBatches) -> tuple[set[bytes], set[bytes]]:
        trained = [whole(of.of_step(step)[0].tokens.numpy(), comm) for step in range(1, 40)]
        held = [whole(of.of_evaluation(index)[0].tokens.numpy(), comm) for index in range(60)]
        return set[bytes]().union(*map(texts, trained)), set[bytes]().union(*map(texts, held))

    before = batches(parse([*words, f"{shared_tmp}/x/*.jsonl"]), comm)
    before.of_step(0)
    meta, tensors = before.state(1)
    ckpt.save(shared_tmp / "state", tensors, comm=comm, meta=meta)
    further = parse([*words, f"{shared_tmp}/?/*.jsonl"])
    after = resumed(further, comm, shared_tmp / "state", 1, 4)
    trained, held = seen(after)
    assert len(trained) > 40 and len(held) > 40 and not trained & held
    _, new = seen(batches(further, comm))
    assert new != held
    after.load(1, 4, {}, {})
    assert seen(after)[1] == new


def test_a_shard_that_some_ranks_cannot_read_is_an_error_on_all(comm: Communicator, shared_tmp: Path) -> None:
    shards = [shared_tmp / f"part-{number:02}.jsonl" for number in range(30)]
    if comm.rank == 0:
        for shard in shards:
            shard.write_text(json.dumps({"text": "a few words " * 9}))
    comm.barrier()
    words = [
        "--data.path",
        f"{shared_tmp}/part-*.jsonl",
        "--data.processes",
        "0",
        "--data.heldout",
        "0",
        "--model.context",
        "24",
        "--train.batch",
        "7",
    ]
    config = parse([*words, "--train.elastic", "true"])
    found = load_data(config.data, comm, batch=config.train.batch)
    assert isinstance(found, DocumentSources) and str(found) == "documents of data: 30 shards, 0.0 MB"
    mine = RankBatches(config, found, comm)
    comm.barrier()
    if comm.rank == 0:
        (shared_tmp / "empty").touch()
        for shard in shards:
            shutil.copy(shared_tmp / "empty", shared_tmp / "other")
            (shared_tmp / "other").replace(shard)  # the shards that are open stay as they are
    comm.barrier()
    with pytest.raises(ValueError, match=r"part-\d+.jsonl: the file is empty"):
        list(map(mine.of_step, range(STEPS)))


def test_data_that_do_not_fit_the_settings(comm: Communicator, shared_tmp: Path) -> None:
    if comm.rank == 0:
        (shared_tmp / "a.jsonl").write_text(json.dumps({"text": "a few words"}))
        np.save(shared_tmp / "a.npy", np.arange(5000) % 300)
    comm.barrier()
    small = ["--data.processes", "0", "--model.context", "24", "--train.batch", "7", "--train.elastic", "true"]
    with pytest.raises(
        ValueError, match=r"data: data has 1 document in .*, and none on this side of data.heldout; take more"
    ):
        batches(parse(["--data.path", f"{shared_tmp}/a.jsonl", "--data.heldout", "0.999999", *small]), comm)
    lone = batches(parse(["--data.path", f"{shared_tmp}/a.jsonl", "--data.heldout", "1e-9", *small]), comm)
    assert lone.heldout.num_batches == 0 and len(lone.of_step(0)[0].tokens) > 0
    assert lone.lacks == ["few data: none of 1 documents is held out (data.heldout), so there are no evaluations"]
    of_tokens = batches(parse(["--data.path", f"{shared_tmp}/a.npy", "--model.vocab", "299", *small]), comm)
    with pytest.raises(
        ValueError, match=r"the data have the tokens \d+ to 299, and the model has 0 to 298; take the vocabulary"
    ):
        list(map(of_tokens.of_step, range(20)))
