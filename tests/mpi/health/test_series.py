"""Spikes and stragglers of real steps."""

import json
import platform
import time
from typing import Any, cast

import pytest
import torch
from checkpoints import tensors
from small_trainers import Make

import ckpt
from collectives import Communicator
from mpitrain.elastic.events import read_events
from mpitrain.health import stragglers
from mpitrain.train.batches.micro_batch import MicroBatch
from mpitrain.train.passes import WholePasses
from mpitrain.train.trainer import Trainer

LAYOUTS = [
    pytest.param((), marks=pytest.mark.ranks(1, 2), id="ZeRO"),
    pytest.param(
        ("--parallel.pipeline", "2", "--parallel.tensor", "2", "--train.accumulate", "2", "--model.layers", "3"),
        marks=pytest.mark.ranks(4),
        id="pipeline of cut stages",
    ),
]


def slow_down(trainer: Trainer, steps: range, seconds: float) -> None:
    """This rank takes longer in these steps (from 0)."""
    train = trainer.passes.train

    def later(*args: Any) -> float:
        if trainer.step in steps:
            time.sleep(seconds)
        return train(*args)

    trainer.passes.train = later  # type: ignore[method-assign]


@pytest.mark.parametrize("args", LAYOUTS)
def test_a_slow_rank_is_named_and_not_those_that_wait_for_it(
    comm: Communicator,
    make: Make,
    args: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last rank sleeps in 30 steps. A rank alone has nobody to compare itself with."""
    monkeypatch.setattr(stragglers, "LEAST_S", 1.0)
    trainer = make("run", 44, *args)
    slow = comm.size - 1
    if comm.rank == slow:
        slow_down(trainer, range(5, 35), 0.03 * comm.size)  # more than ranks that share a core wait for each other
    trainer.fit()
    events = read_events(trainer.run.folder)
    if comm.size == 1:
        assert events == []
        return
    (event,) = events
    assert (event["event"], event["rank"], event["host"]) == ("straggler", slow, platform.node())
    assert event["factor"] > stragglers.FACTOR and event["cost_s"] > 0.5
    if comm.rank == 0:
        assert f"rank {slow} on {platform.node()} computes " in capsys.readouterr().out


def jump(trainer: Trainer, step: int, factor: float) -> None:
    """The loss of a step (from 0) is so many times as high on all ranks."""
    passes = cast(WholePasses, trainer.passes)
    loss = passes._loss

    def jumped(batch: MicroBatch) -> torch.Tensor:
        return loss(batch) * (factor if trainer.step == step else 1.0)

    passes._loss = jumped  # type: ignore[method-assign]


def lines(trainer: Trainer) -> list[dict[str, Any]]:
    trainer.comm.barrier()
    return [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("skips", [False, True])
def test_a_spike_is_told_and_left_out_if_asked(make: Make, skips: bool, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--train.skip-spikes", "--optim.min-lr-ratio", "1") if skips else ()
    trainer = make("run", 44, *args)
    jump(trainer, 37, 1e4)
    trainer.fit()
    (event,) = read_events(trainer.run.folder)
    assert event["event"] == "spike" and event["step"] == 38 and event["skipped"] == skips
    assert event["samples"] == [37 * 12, 38 * 12] and set(event["what"]) == {"loss", "gradient norm"}
    assert event["what"]["loss"]["score"] > trainer.config.train.spike_threshold
    assert [line["step"] for line in lines(trainer) if line.get("skipped")] == [38] * skips
    if trainer.comm.rank == 0:
        assert "step 38: spike: loss " in capsys.readouterr().out
    if not skips:
        return
    # The window is in the checkpoint: a run that stopped just before leaves out the same step.
    part = make("part", 36, *args)
    part.fit()
    rest = make("part", 44, *args)
    jump(rest, 37, 1e4)
    rest.fit()
    kept = ("step", "loss", "grad_norm", "skipped")
    assert [[line.get(key) for key in kept] for line in lines(rest)] == [
        [line.get(key) for key in kept] for line in lines(trainer)
    ]
    assert tensors(ckpt.latest(rest.run.checkpoints)) == tensors(ckpt.latest(trainer.run.checkpoints))


@pytest.mark.ranks(2)
def test_clean_steps_give_no_event_and_checks_cost_little(make: Make) -> None:
    trainer = make("run", 200, "--train.check-every", "5")
    trainer.fit()
    assert read_events(trainer.run.folder) == []
    costs = [line["check_s"] for line in lines(trainer)]
    assert all(0 < cost < 10 for cost in costs)
    checked, others = costs[4::5], costs[2::5]
    assert sorted(checked)[20] > sorted(others)[20]  # the medians: a checked step reads all shards twice
