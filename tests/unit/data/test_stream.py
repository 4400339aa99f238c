"""The stream: the same global batches on any number of ranks, over any resume; each document once an epoch."""

import gzip
import io
import json
import os
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.remarks import Remark, say_remark
from mpitrain.job.data.shards import ShardList, list_shards
from mpitrain.job.data.streaming.chunks import ChunkSequence, Era
from mpitrain.job.data.streaming.feed import DAMAGED, tell
from mpitrain.job.data.streaming.lanes import Recipe, open_lanes
from mpitrain.job.data.streaming.mixture import Mixture
from mpitrain.job.data.streaming.packing import Packing
from mpitrain.job.data.streaming.processes import Processes
from mpitrain.job.data.streaming.sources import DocumentSource
from mpitrain.job.data.streaming.stream import Stream
from mpitrain.job.data.tokenizers import Bytes

SEED, BATCH, CONTEXT = 3, 12, 32


def words(number: int) -> bytes:
    rng = np.random.default_rng(number)
    return b" ".join(b"%d" % each for each in rng.integers(0, 1000, rng.integers(1, 60)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tar shards with 5 documents each, and two files of JSON Lines."""
    path = tmp_path_factory.mktemp("shards")
    for shard in range(7):
        with tarfile.open(path / f"a-{shard:03}.tar", "w") as file:
            for number in range(5):
                info = tarfile.TarInfo(f"{shard * 5 + number:06}.txt")
                info.size = len(words(shard * 5 + number))
                file.addfile(info, io.BytesIO(words(shard * 5 + number)))
    for shard in range(2):
        lines = [json.dumps({"id": n, "text": words(1000 + shard * 40 + n).decode()}) for n in range(40)]
        (path / f"b-{shard}.jsonl").write_text("\n".join(lines) + "\n" * shard)
    return path


def source_of(shards: ShardList, name: str, chunk_bytes: int) -> DocumentSource:
    return DocumentSource(name, shards, chunk_bytes, ((0, len(shards.names)),))


def recipe_of(*sources: DocumentSource, **changed: Any) -> Recipe:
    settings = {
        "weights": (((0, 1.0),),), "lanes": 1, "batch": 1, "context": CONTEXT, "seed": SEED, "packing": "cut",
        "cache": ShardCache(), "tokenizer": Bytes(),
    }  # fmt: skip
    return Recipe(sources, **(settings | changed))


def stream_of(recipe: Recipe, say: Callable[[str], object] = print) -> Stream:
    return Stream(recipe, open_lanes(recipe, say))


def mixed(folder: Path, packing: Packing = "cut", lanes: int = BATCH) -> Recipe:
    return recipe_of(
        source_of(list_shards([f"{folder}/a-{{000..006}}.tar"]), "a", 3000),
        source_of(list_shards([f"{folder}/b-*.jsonl"]), "b", 1000),
        weights=(((0, 3.0),), ((0, 1.0), (20, 3.0))),
        lanes=lanes,
        batch=BATCH,
        packing=packing,
    )


def rows_of(rank: int, size: int, slices: int = 0) -> list[int]:
    """Neighbours, or the rows of slices in turn."""
    rows = np.arange(BATCH)
    if slices:
        return rows.reshape(slices, -1)[rank::size].reshape(-1).tolist()
    return rows[BATCH * rank // size : BATCH * (rank + 1) // size].tolist()


class Ranks:
    """The streams of some ranks. `state`: of all lanes, from another number of ranks. `slices`: see `rows_of`."""

    def __init__(
        self,
        folder: Path,
        size: int,
        packing: Packing,
        lanes: int,
        state: tuple[int, np.ndarray] | None = None,
        slices: int = 0,
    ) -> None:
        self._per_lane = BATCH // lanes
        self._streams = [stream_of(mixed(folder, packing, lanes)) for _ in range(size)]
        self._rows = [rows_of(rank, size, slices) for rank in range(size)]
        if state is not None:
            for stream in self._streams:
                stream.load(*state)

    def batch(self, position: int) -> np.ndarray:
        """The global batch: (2, BATCH, CONTEXT + 1)."""
        whole = np.full((2, BATCH, CONTEXT + 1), -2)
        for stream, rows in zip(self._streams, self._rows, strict=True):
            part = stream.get([position * self._per_lane + n for n in range(self._per_lane)], rows)
            whole[:, rows] = part.tokens, part.segments
        return whole

    def state(self, position: int) -> tuple[int, np.ndarray]:
        parts = [
            piece
            for stream, rows in zip(self._streams, self._rows, strict=True)
            for piece in stream.state(position * self._per_lane, rows).pieces()
        ]
        ordered = sorted(parts, key=lambda piece: piece[0])
        assert [first for first, _ in ordered] == np.cumsum([0, *(len(states) for _, states in ordered)])[:-1].tolist()
        return position * self._per_lane, np.concatenate([states for _, states in ordered])


@pytest.mark.rest
@pytest.mark.parametrize("packing", ["cut", "whole"])
@pytest.mark.parametrize("lanes", [BATCH, 4, 1])
def test_batches_depend_on_the_step_alone(folder: Path, packing: Packing, lanes: int) -> None:
    """At any number of ranks, and over a resume on another number of ranks after every step. Five epochs of the first source pass."""
    num_steps = 30
    alone = Ranks(folder, 1, packing, lanes)
    expected = [alone.batch(step) for step in range(num_steps)]
    assert len({batch.tobytes() for batch in expected}) == num_steps
    for size in (2, 3, 4, 5):
        ranks = Ranks(folder, size, packing, lanes)
        assert all(np.array_equal(ranks.batch(step), expected[step]) for step in range(num_steps)), size
    state = None
    for step in range(num_steps):
        ranks = Ranks(folder, 1 + step % 4, packing, lanes, state, slices=step // 4 % 2 * 4)
        assert np.array_equal(ranks.batch(step), expected[step]), step
        state = ranks.state(step + 1)
    assert state is not None and state[1].nbytes <= 64 * lanes * 2


@pytest.mark.rest
def test_processes_read_the_same_rows(folder: Path) -> None:
    """Two processes for three lanes, of which two have rows of other ranks; with batches that are left out, and over a resume."""
    recipe, processes = mixed(folder, lanes=4), Processes(2, print)
    whole, here, there = stream_of(recipe), stream_of(recipe), Stream(recipe, processes.open_lanes(recipe))
    try:
        for position in (0, 1, 2, 5, 6, 30, 31, 32, 33):
            numbers = range(3 * position, 3 * position + 3)
            whole.get(numbers, range(BATCH))
            expected, got = here.get(numbers, range(2, 7)), there.get(numbers, range(2, 7))
            assert np.array_equal(expected.tokens, got.tokens) and np.array_equal(expected.segments, got.segments)
            after = 3 * position + 3
            for state, other in zip(here.state(after, range(2, 7)), there.state(after, range(2, 7)), strict=True):
                assert np.array_equal(state, other)
            if position in (2, 31):
                for stream in (here, there):
                    stream.load(after, whole.state(after, range(BATCH))[1])
    finally:
        processes.close()


@pytest.mark.rest
def test_errors_of_processes_come_with_their_row(tmp_path: Path) -> None:
    """The rows before the damaged document arrive. A process that was killed is an error too."""
    lines = [json.dumps({"text": f"document {number} " * 20}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:20], "no json", *lines[20:], "nor this"]))
    said: tuple[list[str], list[str]] = ([], [])
    recipe = recipe_of(source_of(list_shards([str(tmp_path / "a.jsonl")]), "a", 4096), max_damaged=1)
    here, processes = stream_of(recipe, said[0].append), Processes(1, said[1].append)
    try:
        there, position = Stream(recipe, processes.open_lanes(recipe)), 0
        while not said[0]:  # once an epoch
            assert np.array_equal(here.get([position], range(1)).tokens, there.get([position], range(1)).tokens)
            position += 1
        for stream in (here, there):
            with pytest.raises(ValueError, match="2 damaged documents; expected 1 at most"):
                stream.get([position + 1000], range(1))
        assert said[0] == said[1] and "a.jsonl, the line at byte" in said[0][0]
        there.load(0, np.zeros((1, 1, 4), np.int64))  # starts another process
        there.get([0], range(1))
        (process,) = processes.running()
        os.kill(process, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"the tokenizing process {process} of this rank ended with code -9"):
            there.get([1000], range(1))
    finally:
        processes.close()


def test_the_next_shard_is_unpacked_ahead(tmp_path: Path) -> None:
    for number in range(4):
        line = json.dumps({"text": f"a long document of shard {number} " * 20})
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    cache = ShardCache(tmp_path / "cache")
    recipe = recipe_of(source_of(list_shards([f"{tmp_path}/*.gz"]), "a", 4096), cache=cache, context=8)
    stream_of(recipe).get([0], range(1))

    def unpacked() -> int:
        return sum(not file.suffix for file in (tmp_path / "cache").rglob("*") if file.is_file())

    until = time.monotonic() + 20
    while unpacked() < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert unpacked() == 2, "the shard of the lane, and the next one"


def test_batches_that_are_left_out_change_no_other(folder: Path) -> None:
    all_of_them, some = Ranks(folder, 2, "cut", BATCH), Ranks(folder, 2, "cut", BATCH)
    expected = [all_of_them.batch(step) for step in range(8)]
    assert np.array_equal(some.batch(0), expected[0])
    assert np.array_equal(some.batch(4), expected[4])
    later = Ranks(folder, 3, "cut", BATCH, some.state(7))
    assert np.array_equal(later.batch(7), expected[7])
    with pytest.raises(ValueError, match="expected 4 or less"):
        some.batch(4)


def test_rows_are_the_documents_end_to_end(folder: Path) -> None:
    """With one lane and one source: nothing is lost or doubled where rows meet."""
    stream = stream_of(recipe_of(source_of(list_shards([f"{folder}/a-*.tar"]), "a", 3000)))
    text = bytearray()
    for position in range(400):
        row = stream.get([position], range(1)).tokens[0].astype(np.uint8).tobytes()
        overlaps = bool(text) and text[-1] != 0
        assert not overlaps or row[0] == text[-1], "the last target is the next row's first token"
        text += row[overlaps:]
    documents = text.split(b"\0")[: 7 * 5 * 2]
    for epoch in range(2):
        assert Counter(map(bytes, documents[epoch * 35 : epoch * 35 + 35])) == Counter(words(n) for n in range(35))
    assert documents[:35] != documents[35:]


def test_whole_documents_stay_whole(folder: Path) -> None:
    length = 4 * max(len(words(n)) for n in range(1000, 1080))
    source = source_of(list_shards([f"{folder}/b-*.jsonl"]), "b", 1 << 20)
    stream = stream_of(recipe_of(source, context=length - 1, packing="whole"))
    found: Counter[bytes] = Counter()
    padding = total = 0
    while sum(found.values()) < 80:
        rows = stream.get([total // length], range(1))
        tokens, segments = rows.tokens[0], rows.segments[0]
        for segment in range(segments.max() + 1):
            found[tokens[segments == segment].astype(np.uint8).tobytes().removesuffix(b"\0")] += 1
        assert (tokens[segments < 0] == 0).all()
        padding, total = padding + int((segments < 0).sum()), total + length
    assert found == Counter(words(n) for n in range(1000, 1080))
    assert padding < 0.15 * total


@pytest.mark.parametrize("num_lanes", [1, 5, 40])
def test_an_epoch_has_each_chunk_once(num_lanes: int) -> None:
    """Also with fewer chunks than lanes."""
    counts = np.array([3, 1, 4, 1, 5] + [2] * 30)
    sequence = ChunkSequence([Era(0, counts)], seed=1, source="s", chunk_bytes=10)
    num = int(counts.sum())
    lanes = [[sequence[number] for number in range(lane, 3 * num, num_lanes)] for lane in range(num_lanes)]
    seen = Counter(chunk for lane in lanes for chunk in lane)
    expected = {(e, s, part * 10) for e in range(3) for s, count in enumerate(counts) for part in range(count)}
    assert set(seen) == expected and set(seen.values()) == {1}
    first, second = (
        [(c.shard, c.begin) for c in map(sequence.__getitem__, range(e * num, (e + 1) * num))] for e in (0, 1)
    )
    assert first != second


def test_a_longer_list_counts_from_an_epoch_on() -> None:
    short, long = np.array([2, 3]), np.array([2, 3, 4])
    sequence = ChunkSequence([Era(0, short), Era(2, long)], seed=1, source="s", chunk_bytes=1)
    before = ChunkSequence([Era(0, short)], seed=1, source="s", chunk_bytes=1)
    assert [sequence[n] for n in range(10)] == [before[n] for n in range(10)]
    assert sequence.epoch_of(9) == 1 and sequence.epoch_of(10) == 2
    assert {(c.shard, c.begin) for c in map(sequence.__getitem__, range(10, 19))} == {
        (s, part) for s, count in enumerate(long) for part in range(count)
    }


@pytest.mark.rest
def test_mixtures_keep_their_weights() -> None:
    batch, points = 32, [[(0, 0.7)], [(0, 0.29)], [(0, 0.01)]]
    mixture = Mixture(points, seed=5, lanes=batch)
    weights, rows = mixture.weights(0), np.arange(batch)
    counts = np.array([np.bincount(mixture.sources(step, rows), minlength=3) for step in range(1000)])
    assert (np.abs(counts - batch * weights) <= 2).all()
    assert np.abs(counts.sum(axis=0) / (1000 * batch * weights) - 1).max() < 0.005
    places = np.array([mixture.sources(step, rows) == 0 for step in range(1000)]).mean(axis=0)
    assert places.min() > 0.6 and places.max() < 0.8, "no place of the batch belongs to a source"
    parts = [mixture.sources(3, np.arange(lo, lo + 8)) for lo in range(0, batch, 8)]
    assert np.array_equal(np.concatenate(parts), mixture.sources(3, rows))


def test_weights_change_with_the_step() -> None:
    mixture = Mixture([[(0, 1.0), (100, 0.0)], [(0, 0.0), (100, 1.0)]], seed=5, lanes=8)
    assert mixture.weights(50).tolist() == [0.5, 0.5] and mixture.weights(1000).tolist() == [0.0, 1.0]
    assert set(mixture.sources(100, np.arange(8))) == {1}
    with pytest.raises(ValueError, match=r"at least 0, and one above 0, got \[0.0, 0.0\] at step 7"):
        Mixture([[(0, 1.0), (7, 0.0)], [(0, 1.0), (7, 0.0)]], seed=5, lanes=8)


def test_lanes_must_divide_the_batch(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a multiple of the run's 5 lanes \(data.lanes\), got 12"):
        mixed(folder, lanes=5)
    with pytest.raises(ValueError, match="the checkpoint has 3 lanes and 2 sources, and this run 12 and 2"):
        stream_of(mixed(folder)).load(0, np.zeros((3, 2, 4), np.int64))


def test_a_source_without_documents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n\n")
    source = source_of(list_shards([str(tmp_path / "empty.jsonl")]), "none", 1)
    with pytest.raises(ValueError, match=f"none has no documents in {tmp_path}"):
        recipe_of(source).check()


@pytest.mark.rest
@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_damaged_documents_are_passed_over_at_any_place(tmp_path: Path, packing: Packing) -> None:
    """Also as the last ones of a chunk, and over a resume after each row."""
    lines = [b'{"text": "%s"}' % words(n) for n in range(40)]
    for damaged in (0, 7, 36, 37, 38, 39):
        lines[damaged] = b'{"text": '
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    said: list[str] = []

    def stream() -> Stream:
        source = source_of(list_shards([str(tmp_path / "a.jsonl")]), "a", 1200)
        return stream_of(recipe_of(source, lanes=2, batch=2, packing=packing, max_damaged=10**6), said.append)

    alone, again = stream(), stream()
    for position in range(400):
        expected = alone.get([position], range(2))
        got = again.get([position], range(2))
        assert np.array_equal(expected.tokens, got.tokens) and np.array_equal(expected.segments, got.segments)
        _, states = again.state(position + 1, range(2))
        again = stream()
        again.load(position + 1, states)
    assert states[:, 0, 0].min() > 10, "the lanes go on"
    assert np.array_equal(alone.state(400, range(2))[1], states)
    assert states[..., DAMAGED].sum() > 12, "each counts in each epoch"
    assert "a.jsonl, the line at byte 0" in said[0] or "a.jsonl, the line at byte" in said[0]


def test_too_many_damaged_documents_end_the_stream(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"other": "field"}\n' * 5000)

    def stream(most: int) -> Stream:
        source = source_of(list_shards([str(tmp_path / "a.jsonl")]), "a", 4096)
        return stream_of(recipe_of(source, context=8, max_damaged=most))

    for most, text in (
        (0, r"data: 1 damaged document; expected 0 at most; .* --data.max-bad-samples: a.jsonl, the line at byte \d+"),
        (20, r"data: 21 damaged documents; expected 20 at most"),
        (10**9, r"data: 1000 damaged documents in a row; the last one: a.jsonl, the line at byte \d+: .*'text'"),
    ):
        with pytest.raises(ValueError, match=text):
            stream(most).get([0], range(1))


def test_names_of_a_stranger_are_printed_as_text(capfd: pytest.CaptureFixture[str]) -> None:
    say_remark(Remark("\x1b]0;title\x07.txt is taken as text"))
    tell("a\x1b[2J\nb.jsonl of http://h/?key=secret: damaged")
    assert capfd.readouterr().err.splitlines() == [
        "data: \\x1b]0;title\\x07.txt is taken as text",
        "data: left out: a\\x1b[2J\\nb.jsonl of http://h/?key=***: damaged",
    ]


def test_text_that_is_not_utf8_is_damaged_in_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"all work \xff\xfe")
    stream = stream_of(recipe_of(source_of(list_shards([str(tmp_path / "a.txt")]), "a", 4096)))
    with pytest.raises(ValueError, match=r"a.txt: expected text in UTF-8"):
        stream.get([0], range(1))


@pytest.mark.parametrize("names", ["*.log", "1.log"])
def test_shards_that_may_be_something_else_are_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], names: str
) -> None:
    """Whichever lanes read them; anew in the next run."""
    for number in range(3):
        (tmp_path / f"{number}.log").write_text('{"text": "a line that is long"}\n' * 40)
    for _ in range(2):
        recipe = recipe_of(source_of(list_shards([f"{tmp_path}/{names}"]), "a", 64), lanes=4, batch=4)
        for lanes in ([2, 3], [1], [0, 1, 2, 3]):
            stream_of(recipe).get(range(9), lanes)
        (line,) = capfd.readouterr().err.splitlines()
        assert ".log is taken as text, and begins with JSON" in line
        assert ("further shards are not named" in line) == (names == "*.log")
