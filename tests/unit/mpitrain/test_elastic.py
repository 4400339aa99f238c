"""What an elastic run decides without MPI: the layout of the ranks that are left, the lease of its folder, the rows of each rank."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import on_ranks

from mpitrain.job.config import parse
from mpitrain.job.data.loading import Corpus
from mpitrain.job.elastic import next_layout
from mpitrain.job.elastic.lease import Lease, raise_lease, read_lease
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.batches.rank_batches import RankBatches

MODEL = ("tp", "cp", "pp")
SIZES = st.sampled_from([1, 1, 2, 3, 4, 6])


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, int]:
    axes = {name: draw(SIZES) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    shared = axes["dp_shard"] * axes["cp"]
    return {**axes, "ep": draw(st.sampled_from([each for each in range(1, shared + 1) if shared % each == 0]))}


LAYOUT = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@given(axes=layouts(), ranks=st.integers(1, 100))
def test_the_next_layout_fits_and_wastes_little(axes: dict[str, int], ranks: int) -> None:
    layout = next_layout(axes, ranks)
    found, model = layout.axes, axes["tp"] * axes["cp"] * axes["pp"]
    assert found.keys() == axes.keys() and all(size >= 1 for size in found.values())
    assert layout.num_used == found["pp"] * found["dp_replicate"] * found["dp_shard"] * found["cp"] * found["tp"]
    assert layout.num_used + layout.num_idle == ranks and layout.num_used > 0
    for name in ("tp", "cp", "pp", "dp_replicate", "ep"):
        assert axes[name] % found[name] == 0, f"{name} becomes a divisor"
    assert found["dp_shard"] * found["cp"] % found["ep"] == 0
    copy = found["tp"] * found["cp"] * found["pp"]
    assert layout.num_idle < copy, "no copy of the model more has place"
    if model <= ranks:
        assert all(found[name] == axes[name] for name in MODEL), "the division of the model stays while it fits"
    else:
        bigger = [
            tp * cp * pp
            for tp in range(1, axes["tp"] + 1)
            for cp in range(1, axes["cp"] + 1)
            for pp in range(1, axes["pp"] + 1)
            if axes["tp"] % tp == axes["cp"] % cp == axes["pp"] % pp == 0 and tp * cp * pp <= ranks
        ]
        assert layout.num_used == max(ranks // size * size for size in bigger)


@given(axes=layouts())
def test_a_layout_on_its_own_ranks_stays(axes: dict[str, int]) -> None:
    ranks = axes["pp"] * axes["dp_replicate"] * axes["dp_shard"] * axes["cp"] * axes["tp"]
    assert next_layout(axes, ranks) == (axes, 0)


@pytest.mark.parametrize(
    ("axes", "ranks", "expected", "idle"),
    [
        ({"tp": 2, "dp_shard": 2}, 3, {"tp": 2, "dp_shard": 1}, 1),
        ({"dp_replicate": 2, "dp_shard": 2}, 3, {"dp_replicate": 1, "dp_shard": 3}, 0),
        ({"tp": 2, "pp": 2}, 3, {"tp": 1, "pp": 1, "dp_shard": 3}, 0),  # all ranks work
        ({"tp": 4}, 2, {"tp": 2}, 0),
        ({"dp_shard": 8, "ep": 4}, 6, {"dp_shard": 6, "ep": 2}, 0),
        ({}, 5, {"dp_shard": 5}, 0),
    ],
)
def test_examples_of_layouts(axes: dict[str, int], ranks: int, expected: dict[str, int], idle: int) -> None:
    layout = next_layout(axes, ranks)
    ones = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), 1)
    assert layout == ({**ones, **expected}, idle)


def test_no_rank_has_no_layout() -> None:
    with pytest.raises(ValueError, match="0 ranks; expected at least 1"):
        next_layout({"tp": 2}, 0)


def test_the_data_ranks_of_a_pipeline_divide_the_batches() -> None:
    axes = {"pp": 2, "dp_shard": 4}
    assert next_layout(axes, 7, batches=8) == ({**dict.fromkeys(LAYOUT, 1), "pp": 2, "dp_shard": 2}, 3)
    assert next_layout(axes, 7).num_idle == 1
    assert next_layout({"dp_shard": 8}, 7, batches=8).num_idle == 0


@pytest.mark.parametrize(
    ("axes", "ranks", "batches", "copies", "idle"),
    [
        ({"dp_replicate": 4, "dp_shard": 1}, 3, None, 3, 0),  # and not a divisor of 4
        ({"dp_replicate": 3, "dp_shard": 2}, 5, None, 2, 1),
        ({"dp_replicate": 3, "dp_shard": 2, "tp": 2}, 7, None, 1, 3),
        ({"dp_replicate": 4, "pp": 2}, 7, 8, 2, 3),  # three copies cannot share 8 sequences
        ({"dp_replicate": 2, "dp_shard": 1}, 4, None, 2, 2),  # as many as before
    ],
)
def test_copies_that_train_apart_stay_whole(
    axes: dict[str, int], ranks: int, batches: int | None, copies: int, idle: int
) -> None:
    layout = next_layout(axes, ranks, batches=batches, whole_copies=True)
    assert layout == ({**dict.fromkeys(LAYOUT, 1), **axes, "dp_replicate": copies}, idle)
    assert next_layout({"dp_replicate": 2, "dp_shard": 4}, 3, whole_copies=True).axes["dp_shard"] == 3, (
        "no copy has place"
    )


# The lease


def test_each_lease_is_higher_and_keeps_the_run(tmp_path: Path) -> None:
    assert read_lease(tmp_path) is None
    first, second = raise_lease(tmp_path), raise_lease(tmp_path)
    assert (first.number, second.number, first.run == second.run) == (1, 2, True)
    assert read_lease(tmp_path) == second
    assert [file.name for file in tmp_path.iterdir()] == [".lease"], "no part of it stays"
    (tmp_path / "other").mkdir()
    assert raise_lease(tmp_path / "other").run != first.run


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', '{"run": "a"}', '{"run": "a", "number": "no"}', "\0"])
def test_a_damaged_lease_begins_a_new_run(tmp_path: Path, text: str) -> None:
    (tmp_path / ".lease").write_text(text)
    assert read_lease(tmp_path) is None
    lease = raise_lease(tmp_path)
    assert lease.number == 1 and read_lease(tmp_path) == lease


def test_a_lease_that_cannot_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / ".lease").write_text(json.dumps(Lease("run", 4)._asdict()))
    with pytest.raises(OSError):
        raise_lease(tmp_path / "missing")
    assert read_lease(tmp_path) == Lease("run", 4)


# Rows

CORPUS = Corpus(*np.split(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8), [4000]), 1, "")


def batches_of(size: int, batch: int, accumulate: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank in step 3, and behind them the one of evaluation batch 1."""
    words = ["--train.batch", str(batch), "--train.accumulate", str(accumulate), "--model.context", "16"]
    config = parse([*words, "--train.eval-batches", "2"])

    def of_rank(comm: object) -> list[MicroBatch]:
        batches = RankBatches(config, CORPUS, comm)  # type: ignore[arg-type]
        return [*batches.of_step(3), *batches.of_evaluation(1)]

    return on_ranks(size, of_rank)


@pytest.mark.parametrize("batch", [1, 7, 8, 12])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_all_rows_of_a_batch_come_once_and_in_order(batch: int, accumulate: int) -> None:
    ((*whole, held),) = batches_of(1, batch, accumulate)
    rows, targets = torch.cat([each.tokens for each in whole]), torch.cat([each.targets for each in whole])
    assert len(rows) == len(held.tokens) == batch
    assert len({tuple(row.tolist()) for row in rows}) == batch
    for size in range(1, min(batch, 5) + 1):
        ranks = batches_of(size, batch, accumulate)
        micro = [each for *theirs, _ in ranks for each in theirs]
        assert len(micro) == size * accumulate, "each rank has all micro-batches, also empty ones"
        assert torch.equal(torch.cat([each.tokens for each in micro]), rows)
        assert torch.equal(torch.cat([each.targets for each in micro]), targets)
        assert torch.equal(torch.cat([theirs[-1].tokens for theirs in ranks]), held.tokens)
        counts = [sum(len(each.tokens) for each in theirs) for *theirs, _ in ranks]
        assert max(counts) - min(counts) <= 1
        assert sum(each.num_counted for each in micro) == batch * 16
        if batch % (size * accumulate) == 0:
            assert {len(each.tokens) for each in micro} == {batch // (size * accumulate)}
