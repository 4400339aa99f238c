"""Documents with slices: each rank reads the rows of its slices alone, and a run has the same bits at any number of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from main_job import metrics
from two_sources import two_sources

import ckpt
from collectives import Communicator
from mpitrain.job.config import Config, parse
from mpitrain.job.data.loading import load_data
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.batches.rank_batches import RankBatches
from mpitrain.job.train.trainer import Trainer

STEPS, SLICES = 6, 4
SETTINGS = """
    --model.width 16 --model.layers 1 --model.heads 2 --model.context 24 --train.batch 8 --train.eval-batches 2 --train.sample-bytes 0
    --data.heldout 0.2 --log.every 1000 --checkpoint.every 0 --parallel.bind false --parallel.threads 1
"""

RUN = f"""
    --train.slices {SLICES} --train.eval-every 1 --data.packing whole --data.processes 1 --optim.lr 0.01 --optim.warmup-steps 1
    --optim.schedule constant
"""


@pytest.fixture
def table(comm: Communicator, shared_tmp: Path) -> Path:
    """Two sources."""
    return two_sources(comm, shared_tmp)


def settings(table: Path, *args: str) -> Config:
    return parse(["--config", str(table), *SETTINGS.split(), *args])


def batches(config: Config, comm: Communicator) -> RankBatches:
    return RankBatches(config, load_data(config.data, comm, batch=config.train.batch), comm)


def unsliced(config: Config, comm: Communicator) -> RankBatches:
    return batches(replace(config, train=replace(config.train, slices=0)), comm)


def arrays(batch: MicroBatch) -> list[np.ndarray]:
    """What the model gets of each row."""
    assert batch.segments is not None and batch.sources is not None
    places = batch.segments.positions.reshape(batch.tokens.shape)
    return [batch.tokens.numpy(), batch.targets.numpy(), places.numpy(), batch.sources]


def whole(mine: Sequence[MicroBatch], comm: Communicator) -> Iterator[np.ndarray]:
    """The arrays of the slices of all ranks. A repeated slice has the same rows, and no targets."""
    seen: dict[int | None, MicroBatch] = {}
    for batch in mine:
        if batch.slice in seen:
            assert torch.equal(batch.tokens, seen[batch.slice].tokens)
            assert (batch.num_counted, batch.num_padding) == (0, 0)
        seen.setdefault(batch.slice, batch)
    of_all = {
        number: its
        for each in comm.all_gather_object({n: arrays(b) for n, b in seen.items()})
        for number, its in each.items()
    }
    assert sorted(of_all) == list(range(SLICES))
    return map(np.concatenate, zip(*(of_all[number] for number in range(SLICES)), strict=True))


@pytest.mark.rest
@pytest.mark.parametrize(("packing", "lanes"), [("cut", "8"), ("whole", "4")])
def test_slices_are_the_batches_of_one_process(comm: Communicator, table: Path, packing: str, lanes: str) -> None:
    config = settings(table, "--train.slices", str(SLICES), "--data.packing", packing, "--data.lanes", lanes)
    itself = comm.split(comm.rank)
    alone, mine = unsliced(replace(config, data=replace(config.data, processes=0)), itself), batches(config, comm)
    for step in range(STEPS):
        found = mine.of_step(step)
        mine.prepare(step + 1)
        assert len(found) == -(-SLICES // comm.size)
        (expected,) = alone.of_step(step)
        for one, other in zip(whole(found, comm), arrays(expected), strict=True):
            assert np.array_equal(one, other), step
        assert sum(comm.all_gather_object(sum(batch.num_padding for batch in found))) == expected.num_padding
    for index in (0, 1, 0):
        (expected,) = alone.of_evaluation(index)
        for one, other in zip(whole(mine.of_evaluation(index), comm), arrays(expected), strict=True):
            assert np.array_equal(one, other), index
    own = [
        n for s in range(comm.rank, SLICES, comm.size) for n in np.arange(int(lanes)).reshape(SLICES, -1)[s].tolist()
    ]
    pieces = mine.state(STEPS)[1]["data/lanes"]
    assert [piece.offset[0] + n for piece in pieces for n in range(len(piece.data))] == own, (
        "no rank reads others' lanes"
    )
    mine.close()
    itself.free()


def test_a_saved_state_goes_on_at_another_number_of_ranks(comm: Communicator, table: Path, shared_tmp: Path) -> None:
    """All ranks and the even ones alone take turns."""
    config = settings(table, "--train.slices", str(SLICES), "--data.packing", "whole", "--data.processes", "0")
    itself, half = comm.split(comm.rank), comm.split(comm.rank % 2)
    alone = unsliced(config, itself)
    state: tuple[Any, int] | None = None
    for step in range(STEPS):
        ranks = half if step % 2 else comm
        mine = batches(config, ranks)
        if state is not None:
            room = mine.room(state[0])
            ckpt.load(shared_tmp / "state", room, comm=ranks)
            mine.load(step, state[1], state[0], room)
        (expected,) = alone.of_step(step)
        for one, other in zip(whole(mine.of_step(step), ranks), arrays(expected), strict=True):
            assert np.array_equal(one, other), step
        meta, tensors = mine.state(step + 1)
        state = meta, mine.train.next_sample(step + 1)
        comm.barrier()
        if ranks is comm or comm.rank % 2 == 0:
            ckpt.save(shared_tmp / "state", tensors, comm=ranks, meta=meta, overwrite=True)
        comm.barrier()
    itself.free()
    half.free()


def test_lanes_that_slices_would_share_are_refused(comm: Communicator, table: Path) -> None:
    config = settings(table, "--train.slices", "8", "--data.lanes", "4", "--data.processes", "0")
    with pytest.raises(
        ValueError, match=r"train.slices: expected a divisor of the run's 4 lanes .*, got 8; take 4 at most"
    ):
        batches(config, comm)
    small = unsliced(config, comm)
    meta = small.state(0)[0]
    wider = batches(replace(config, data=replace(config.data, lanes=None)), comm)
    with pytest.raises(ValueError, match=r"train.slices: expected a divisor of the run's 4 lanes"):
        wider.room(meta)


FIGURES = (
    "loss",
    "grad_norm",
    "loss/a",
    "loss/b",
    "padding",
    "heldout_loss",
    "heldout_loss/a",
    "heldout_loss/b",
    "heldout_bits_per_byte",
)


def figures(run: Path) -> list[dict[str, Any]]:
    """Those of each line that have the same bits."""
    found = [{name: line[name] for name in FIGURES if name in line} for line in metrics(run)]
    assert any("loss/b" in line for line in found) and any("heldout_loss/b" in line for line in found)
    return found


@pytest.mark.rest
@pytest.mark.ranks(2, 3, 4)
def test_a_run_that_stops_and_goes_on_at_another_number_of_ranks(
    comm: Communicator, table: Path, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bits of a run on one rank."""
    monkeypatch.setenv("MPITRAIN_RECORD_DIR", str(shared_tmp))
    monkeypatch.setenv("MPITRAIN_TTY", "0")
    monkeypatch.setattr("mpitrain.job.train.trainer.matmul_flops_per_s", lambda device, dtype: 1e9)
    itself = comm.split(comm.rank)

    def train(run: str, ranks: Communicator, steps: int) -> Path:
        config = settings(table, *RUN.split(), "--run", str(shared_tmp / run), "--train.steps", str(steps))
        if ranks is comm or comm.rank == 0:
            Trainer(config, ranks).fit()
        comm.barrier()
        return shared_tmp / run

    expected = figures(train("alone", itself, STEPS))
    train("moved", comm, 3)
    train("moved", itself, 4)
    assert figures(train("moved", comm, STEPS)) == expected
    itself.free()
