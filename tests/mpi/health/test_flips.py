"""A bit that flips in a shard between two steps of the optimizer is found before the next step uses it, and the rank is named."""

import platform

import pytest
import torch
from run_events import faults
from small_trainers import Make, flip, in_step

from collectives import Communicator
from mpitrain.job.health import FlippedBitError
from mpitrain.job.train.trainer import Trainer

CHECKED = ("--train.check-every", "4", "--train.max-rewinds", "1")
STORAGES = {
    "resident": (),
    "private": ("--parallel.storage", "private"),
    "stage 0": ("--parallel.stage", "0"),
    "bf16": ("--parallel.param-dtype", "bfloat16"),
}


def largest(trainer: Trainer) -> tuple[str, torch.nn.Parameter]:
    """The parameter of which this rank has most elements."""
    return max(trainer.model.named_parameters(), key=lambda each: each[1].numel())


CASES = [(storage, what) for storage in STORAGES for what in ("model", "exp_avg_sq", "step")]
FEW = [("resident", "model"), ("private", "exp_avg_sq")]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("storage", "what"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.ranks(2)) for case in CASES],
)
def test_a_bit_flips_in_a_checked_step(comm: Communicator, make: Make, storage: str, what: str) -> None:
    trainer = make("run", 8, *CHECKED, *STORAGES[storage])
    wrong, (name, param) = comm.size - 1, largest(trainer)

    def act() -> None:
        if comm.rank == wrong:
            tensor = param if what == "model" else trainer.optimizer.state[param][what]
            flip(tensor, tensor.numel() - 1, bit=13)

    in_step(trainer, 8, act)
    with pytest.raises(FlippedBitError) as caught:
        trainer.fit()
    said = str(caught.value)
    assert comm.all_gather_object(said) == [said] * comm.size
    name = comm.all_gather_object(name)[wrong]
    label = f"model/{name}" if what == "model" else f"optimizer/{what}/{name}"
    where = f"rank {wrong} on {platform.node()}"
    assert said.startswith(f"step 8: {where}: bit 13 of an element (float32) of {label} changed"), said
    event = faults(trainer.run.folder)[-1]
    assert (event["event"], event["rank"], event["step"]) == ("flipped_bit", wrong, 8)


@pytest.mark.ranks(1, 2)
def test_every_bit_of_a_checked_step_is_seen_from_the_end_of_the_step_before(comm: Communicator, make: Make) -> None:
    """Also right after the optimizer's step, before the forward; and from the start of a run if its first step is checked."""
    trainer = make("run", 8, "--train.check-every", "1")
    begin = trainer.health.begin

    def begin_and_flip(step: int) -> None:
        begin(step)
        if comm.rank == 0:
            flip(largest(trainer)[1], 3, bit=31)

    trainer.health.begin = begin_and_flip  # type: ignore[method-assign]
    with pytest.raises(FlippedBitError, match=r"step 1: rank 0 on \S+: bit 31 of an element \(float32\) of model/"):
        trainer.fit()


@pytest.mark.ranks(2)
def test_what_an_unchecked_step_does_not_show(comm: Communicator, make: Make) -> None:
    """The documented limit: between two checked steps a flip in a shard without a copy becomes a value like any other."""
    trainer = make("run", 8, *CHECKED)
    in_step(trainer, 2, lambda: flip(largest(trainer)[1], 0, bit=5) if comm.rank == 1 else None)
    trainer.fit()
    assert faults(trainer.run.folder) == []
