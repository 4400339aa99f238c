"""Spikes of real steps."""

import json
from typing import Any, cast

import pytest
import torch
from checkpoints import tensors
from run_events import faults
from small_trainers import Make

import ckpt
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.passes import WholePasses
from mpitrain.job.train.trainer import Trainer

pytestmark = pytest.mark.rest


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
    (event,) = faults(trainer.run.folder)
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
    assert faults(trainer.run.folder) == []
    costs = [line["check_s"] for line in lines(trainer)]
    assert all(0 < cost < 10 for cost in costs)
    checked, others = costs[4::5], costs[2::5]
    assert sorted(checked)[20] > sorted(others)[20]  # the medians: a checked step reads all shards twice
