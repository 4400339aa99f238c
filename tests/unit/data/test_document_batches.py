"""Batches of documents over rewinds, other batch sizes, longer lists and other settings."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.shard_names import shard_names
from mpitrain.job.data.shards import ShardList, in_their_folder, list_shards
from mpitrain.job.data.streaming.batches import DocumentBatches
from mpitrain.job.data.streaming.feed import OFFSET
from mpitrain.job.data.streaming.lanes import Recipe, open_lanes
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.tokenizers import Bytes

CONTEXT = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(4):
        lines = [json.dumps({"text": f"document {n} of shard {shard} " * (n % 3 + 1)}) for n in range(10)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))
    return tmp_path


def batches(
    folder: Path, *, lanes: int = 3, batch: int = 6, pattern: str = "*.jsonl", **changed: Any
) -> DocumentBatches:
    source = DocumentSource.new("a", list_shards([f"{folder}/{pattern}"]), lanes=lanes)
    settings: dict[str, Any] = {
        "context": CONTEXT,
        "seed": 1,
        "packing": "cut",
        "share": (0.1, 1.0),
        "tokenizer": Bytes(),
    } | changed
    recipe = Recipe((source,), (((0, 1.0),),), lanes=lanes, batch=batch, cache=ShardCache(), **settings)
    return DocumentBatches(recipe, partial(open_lanes, say=print))


def saved(of: DocumentBatches, step: int) -> tuple[int, dict[str, Any], dict[str, np.ndarray]]:
    meta, tensors = of.described()
    return of.next_sample(step), meta, {**tensors, "lanes": of.states(step, range(of.batch))[1]}


def resumed(
    into: DocumentBatches, step: int, state: tuple[int, dict[str, Any], dict[str, np.ndarray]]
) -> DocumentBatches:
    into.shapes(state[1])
    into.go_on(step, state[0])
    into.load(*state)
    return into


def rows(of: DocumentBatches, step: int) -> np.ndarray:
    return of.get(step, range(of.batch)).tokens


def test_two_rewinds_to_one_state(folder: Path) -> None:
    """The second one leaves out more, and what the first one has left out stays left out."""
    plain = batches(folder)
    expected = [rows(plain, step) for step in range(10)]
    run = batches(folder)
    for step in range(3):
        rows(run, step)
    state = saved(run, 3)
    rows(run, 3)  # bad
    resumed(run, 3, state)
    run.leave_out([(18, 24)])
    assert np.array_equal(rows(run, 3), expected[4])
    assert np.array_equal(rows(run, 4), expected[5])  # bad
    resumed(run, 3, state)
    run.leave_out([(30, 36)])
    assert [np.array_equal(rows(run, step), expected[step + 1 + (step > 3)]) for step in range(3, 7)] == [True] * 4


def test_another_batch_size_with_samples_that_are_left_out_inside_a_batch(folder: Path) -> None:
    plain = batches(folder, lanes=3, batch=3)
    expected = [rows(plain, step) for step in range(12)]  # a row of each lane
    run = batches(folder, lanes=3, batch=3)
    rows(run, 0)
    larger = resumed(batches(folder, lanes=3, batch=9), 1, saved(run, 1))
    larger.leave_out([(6, 9)])
    of_lanes = rows(larger, 1).reshape(3, 3, -1)  # lane, row of the lane
    assert np.array_equal(of_lanes.transpose(1, 0, 2), np.stack([expected[1], expected[3], expected[4]]))
    assert np.array_equal(rows(larger, 2).reshape(3, 3, -1).transpose(1, 0, 2), np.stack(expected[5:8]))


@pytest.mark.parametrize("num_steps", [1, 30])
def test_a_list_that_became_longer_changes_nothing_before_its_epoch(folder: Path, num_steps: int) -> None:
    short = batches(folder, pattern="[01].jsonl")
    for step in range(num_steps):
        rows(short, step)
    state = saved(short, num_steps)
    longer = resumed(batches(folder), num_steps, state)
    (source,) = longer.described()[0]["sources"]
    (_, first_count), (from_epoch, count) = source["eras"]
    assert (first_count, count) == (2, 4)
    step, expected = num_steps, rows(short, num_steps)
    while short.states(step + 1, range(6))[1][:, 0, 0].max() < from_epoch * first_count:  # each shard is a chunk
        assert np.array_equal(rows(longer, step), expected), step
        step += 1
        expected = rows(short, step)
    assert step > num_steps
    again = resumed(batches(folder), step, saved(longer, step))
    text = b""
    for later in range(step, step + 60):
        batch = rows(again, later)
        assert np.array_equal(batch, rows(longer, later))
        text += batch.astype(np.uint8).tobytes()
    assert b"of shard 3" in text and b"of shard 0" in text


def test_a_further_folder(folder: Path) -> None:
    (folder / "x").mkdir()
    for shard in range(2):
        (folder / f"{shard}.jsonl").rename(folder / f"x/{shard}.jsonl")
    before = batches(folder, pattern="x/*.jsonl")
    rows(before, 0)
    state = saved(before, 1)
    (folder / "y").mkdir()
    (folder / "2.jsonl").rename(folder / "y/2.jsonl")
    after = resumed(batches(folder, pattern="?/*.jsonl"), 1, state)
    assert np.array_equal(rows(after, 1), rows(before, 1))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"packing": "whole"},
            "data.packing: the run was saved with cut, got whole: its place in the documents would be another",
        ),
        ({"share": (0.2, 1.0)}, "data.heldout: the run was saved with 0.1, got 0.2"),
        ({"seed": 2}, "train.seed: the run was saved with 1, got 2"),
        ({"batch": 7, "lanes": 7}, r"train.batch: expected a multiple of the run's 3 lanes \(data.lanes\), got 7"),
    ],
)
def test_settings_that_move_the_places_are_refused(folder: Path, changed: dict[str, Any], text: str) -> None:
    run = batches(folder)
    rows(run, 0)
    state = saved(run, 1)
    with pytest.raises(ValueError, match=text):
        batches(folder, **changed).shapes(state[1])


@pytest.mark.parametrize(
    ("folder", "raw", "paths"),
    [
        ("https://u:p4ss@h/x", ("a.jsonl", "b.jsonl"), ("https://u:new@h/x/a.jsonl", "https://u:new@h/x/b.jsonl")),
        ("https://h/x", ("a.jsonl?X-Sig=p4ss", "b.jsonl?X-Sig=p4ss"), ("https://h/x/b.jsonl?X-Sig=2", "https://h/x/a.jsonl?X-Sig=1")),
        ("https://h/x", ("a.jsonl?X-Sig=p4ss",), ("https://h/x/a.jsonl?X-Sig=1", "https://h/y/b.jsonl")),
        ("https://h/a.jsonl?sig=p4ss", ("p4ss",), ("https://h/a.jsonl?sig=1",)),
        ("", ("https://u:p4ss@h/a.jsonl", "s3://b/a.jsonl"), ("https://u:new@h/a.jsonl", "s3://b/a.jsonl")),
    ],
)  # fmt: skip
def test_a_checkpoint_with_secrets_in_its_names(folder: str, raw: tuple[str, ...], paths: tuple[str, ...]) -> None:
    """Earlier versions kept them. The same shards with renewed signatures go on, and an error shows none."""
    now_folder, names = in_their_folder(shard_names(paths, [1 << 20] * len(paths)))
    shards = ShardList(now_folder, names, paths, np.full(len(paths), 1 << 20))
    saved = DocumentSource.new("a", shards, lanes=2).meta() | {"folder": folder, "eras": [[0, len(raw)]]}
    again = DocumentSource.new("a", shards, lanes=2).resumed(saved, raw, np.full(len(raw), 1 << 20), furthest=0)
    assert sorted(again.shards.paths) == sorted(paths)
    assert again.shards.paths[0].partition("?")[0].endswith("a.jsonl")
    assert "p4ss" not in str(again)
    with pytest.raises(
        ValueError, match=r"the run has read .*a\.jsonl.* of a in .*, and it has 1048576 bytes now"
    ) as raised:
        DocumentSource.new("a", shards, lanes=2).resumed(saved, raw, np.full(len(raw), 1 << 21), furthest=0)
    assert "p4ss" not in str(raised.value)


def test_a_hundred_thousand_shards() -> None:
    num = 100_000
    names = tuple(f"part-{number:06}-of-{num}.jsonl" for number in range(num))
    sizes = np.random.default_rng(0).integers(1 << 20, 1 << 30, num)
    began = time.perf_counter()
    source = DocumentSource.new(
        "a", ShardList("s3://b", names, tuple(f"s3://b/{name}" for name in names), sizes), lanes=512
    )
    again = source.resumed(source.meta(), names, sizes, furthest=10**6)
    assert again.sequence(1)[123456] == source.sequence(1)[123456]
    assert len(source.shards.packed()) < 5e6
    assert time.perf_counter() - began < 10, "2 s on an idle machine"


@pytest.mark.parametrize("packing", ["cut", "whole"])
@pytest.mark.parametrize("offset", [1 << 40, 10_000])
def test_a_place_behind_the_end_of_a_document(folder: Path, packing: str, offset: int) -> None:
    run = batches(folder, packing=packing)
    rows(run, 0)
    next_sample, meta, tensors = saved(run, 1)
    tensors["lanes"][1, 0, OFFSET] = offset
    again = resumed(batches(folder, packing=packing), 1, (next_sample, meta, tensors))
    with pytest.raises(
        ValueError, match=rf"the checkpoint's place in the documents is none: number {offset} of document"
    ):
        rows(again, 1)
