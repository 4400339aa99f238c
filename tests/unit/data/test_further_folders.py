"""Resumes with further folders of shards: shards are found again, and the keys of documents stay."""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from thread_ranks import on_ranks

from mpitrain.job.config import ConfigError, parse
from mpitrain.job.data.corpus import share_of
from mpitrain.job.data.loading import load_data
from mpitrain.job.data.shards import ShardList, in_their_folder, list_shards, unpacked
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.train.batches.rank_batches import RankBatches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(4):
        (tmp_path / f"{shard}.jsonl").write_text(json.dumps({"text": "b" * (shard + 9)}))
    return tmp_path


def resumed_source(before: DocumentSource, *patterns: str) -> DocumentSource:
    """A source of these patterns that goes on from a checkpoint of another one."""
    names, sizes, marks, listed = unpacked(before.shards.packed())
    now = DocumentSource.new("a", list_shards(patterns), lanes=2)
    return now.resumed(before.meta(), names, sizes, 0, marks=marks, listed=listed, say=pytest.fail)


def test_further_folders_again_and_again(folder: Path) -> None:
    """Each checkpoint knows where its shards are in the list, and the keys of documents stay."""
    patterns = [f"{folder}/x/y/[01].jsonl", f"{folder}/x/z/*.jsonl", f"{folder}/*.jsonl"]
    for inside in ("x/y", "x/z"):
        (folder / inside).mkdir(parents=True)
        for shard in range(2):
            (folder / f"{inside}/{shard}.jsonl").write_text('{"text": "' + "a" * (shard + len(inside)) + '"}')
    source = DocumentSource.new("a", list_shards(patterns[:1]), lanes=2)
    for num in (1, 2, 2, 3, 3, 3):
        last, source = source, resumed_source(source, *patterns[:num])
        num_before = len(last.shards.names)
        assert (
            source.shards.names[:num_before] == last.shards.names
            and source.shards.paths[:num_before] == last.shards.paths
        )
    assert source.shards.names[:4] == ("0.jsonl", "1.jsonl", "z/0.jsonl", "z/1.jsonl") and len(source.eras) == 3
    assert len(source.shards.paths) == 8
    (folder / "x").rename(folder / "moved")  # all of them
    (folder / "new/deep").mkdir(parents=True)
    for each in [*folder.glob("*.jsonl"), folder / "moved"]:
        each.rename(folder / "new/deep" / ("x" if each.name == "moved" else each.name))
    new = f"{folder}/new/deep"
    again = resumed_source(source, f"{new}/x/y/*", f"{new}/x/z/*", f"{new}/*.jsonl")
    assert again.shards.names == source.shards.names and again.shards.paths[0] == f"{new}/x/y/0.jsonl"


def test_a_further_folder_on_another_disk() -> None:
    """The list has no folder then: its names are whole paths, or addresses."""
    for before, further in (
        ("/data/s", "/scratch/s"),
        ("https://h/s", "s3://b/s"),
        ("s3://b/s", "s3://c/s"),
        ("/data/s", "s3://b/s"),
    ):
        paths = [f"{before}/0.jsonl", f"{before}/1.jsonl", f"{further}/0.jsonl"]
        sizes = np.array([5, 6, 7])
        first = DocumentSource.new("a", ShardList(*in_their_folder(paths[:2]), tuple(paths[:2]), sizes[:2]), lanes=2)
        order = np.argsort(paths)
        ordered = [paths[index] for index in order]
        new = DocumentSource.new("a", ShardList(*in_their_folder(ordered), tuple(ordered), sizes[order]), lanes=2)
        for _ in range(3):
            names, its_sizes, marks, listed = unpacked(first.shards.packed())
            first = new.resumed(first.meta(), names, its_sizes, 0, marks=marks, listed=listed)
            assert list(first.shards.paths) == paths and first.shards.names[:2] == ("0.jsonl", "1.jsonl")


@pytest.mark.parametrize("size", [1, 2])
def test_a_further_folder_above_with_files_of_the_same_names(tmp_path: Path, size: int) -> None:
    (tmp_path / "sub").mkdir()
    for inside, num in (("sub/", 1), ("", size)):
        for name in "ab":
            (tmp_path / f"{inside}{name}.jsonl").write_text("{}\n" * num)
    source = DocumentSource.new("a", list_shards([f"{tmp_path}/sub/*.jsonl"]), lanes=2)
    both = (f"{tmp_path}/sub/*.jsonl", f"{tmp_path}/*.jsonl")
    again = resumed_source(resumed_source(source, *both), *both)
    assert again.shards.paths[:2] == source.shards.paths and len(again.shards.paths) == 4
    moved = DocumentSource.new("a", list_shards(both[1:]), lanes=2)
    if size == 1:  # the folder has moved to the one above
        assert resumed_source(source, both[1]).shards.paths == moved.shards.paths
    (tmp_path / "sub/b.jsonl").unlink()
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ValueError, match=r"the run has read sub/b\.jsonl of a in .*, and it is not there"):
        resumed_source(source, *both)


@pytest.mark.parametrize("is_held_out", [True, False])
def test_names_of_a_checkpoint_decide_whether_there_is_an_evaluation(tmp_path: Path, is_held_out: bool) -> None:
    """With the names of the list it would be the other way round."""

    def is_held(key: str) -> bool:
        return share_of(key.encode()) < 0.5

    names = (f"{number}.jsonl" for number in itertools.count())
    name = next(n for n in names if is_held(f"{n}:0") == is_held_out != is_held(f"x/{n}:0") and not is_held(f"{n}:40"))
    other = next(n for n in names if not is_held(f"y/{n}:0"))
    paths = [tmp_path / "x" / name, tmp_path / "y" / other]
    for path, num in zip(paths, (2, 1), strict=True):
        path.parent.mkdir()
        path.write_text(f"{json.dumps({'text': 'a' * 27})}\n" * num)
    assert paths[0].read_bytes().find(b"\n") == 39

    def batches_of(comm: Any, *shards: Path) -> RankBatches:
        words = [
            "--data.path",
            *map(str, shards),
            "--data.heldout",
            "0.5",
            "--data.processes",
            "0",
            "--data.lanes",
            "2",
        ]
        config = parse([*words, "--train.batch", "2", "--model.context", "16", "--train.eval-only"])
        return RankBatches(config, load_data(config.data, comm, batch=2), comm)

    def of_rank(comm: Any) -> None:
        before, after = batches_of(comm, paths[0]), batches_of(comm, *paths)
        before.of_step(0)
        meta, tensors = before.state(1)
        states = {name: each[0].data if isinstance(each, list) else each for name, each in tensors.items()}
        assert bool(after.heldout.num_batches) != is_held_out
        lines = after.load(1, before.train.next_sample(1), meta, states)
        assert any("so there are no evaluations" in line for line in lines) != is_held_out
        with nullcontext() if is_held_out else pytest.raises(ConfigError, match="too few data are held out"):
            after.check_evaluation()

    on_ranks(1, of_rank)
