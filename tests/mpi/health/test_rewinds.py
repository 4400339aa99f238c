"""A run goes back to its last good state, leaves out the data of the bad steps, and repeats bit for bit, also over a stop."""

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoints import tensors
from run_events import faults
from small_trainers import Make

import ckpt
from collectives import Communicator
from mpitrain.job.elastic.copies.files import complete_copies
from mpitrain.job.elastic.copies.holding import remove_all
from mpitrain.job.elastic.lease import read_lease
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.passes import WholePasses
from mpitrain.job.train.trainer import Trainer

BATCH = 12
SAVES = ("--checkpoint.every", "4", "--checkpoint.keep", "9")


def poison(trainer: Trainer, samples: set[int], *, value: float = math.nan) -> list[tuple[int, int]]:
    """The loss of a batch with one of these samples is not finite. Returns a list that gets (step, first sample) of each forward."""
    passes, train = cast(WholePasses, trainer.passes), trainer.batches.train
    loss, seen = passes._loss, []

    def poisoned(batch: MicroBatch) -> torch.Tensor:
        first = train.next_sample(trainer.step)
        seen.append((trainer.step, first))
        return loss(batch) * (value if samples & set(range(first, first + BATCH)) else 1.0)

    passes._loss = poisoned  # type: ignore[method-assign]
    return seen


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def outcome(trainer: Trainer) -> tuple[Any, ...]:
    """What of a run depends on the computation alone."""
    trainer.comm.barrier()
    kept = [[line.get(key) for key in ("step", "loss", "lr", "grad_norm")] for line in lines(trainer.run.folder)]
    return kept, tensors(ckpt.latest(trainer.run.checkpoints))


@pytest.mark.rest
@pytest.mark.parametrize("saves", [(), SAVES], ids=["initial state", "checkpoint"])
def test_the_data_of_a_bad_step_are_left_out(comm: Communicator, make: Make, saves: tuple[str, ...]) -> None:
    back_to = 4 if saves else 0
    trainer = make("run", 12, *saves, "--train.max-rewinds", "2")
    bad = 6 * BATCH
    seen = poison(trainer, {bad + 5})
    trainer.fit()
    assert seen[:8] == [*((step, step * BATCH) for step in range(7)), (back_to, back_to * BATCH)]
    assert dict(seen)[5] == 5 * BATCH and dict(seen)[6] == 7 * BATCH and dict(seen)[11] == 12 * BATCH
    assert [line["step"] for line in lines(trainer.run.folder)] == list(range(1, 13))
    assert trainer.stepper.num_skipped == 0
    (event,) = faults(trainer.run.folder)
    assert event["event"] == "rewind" and event["to_step"] == back_to and event["steps"] == [7, 7]
    assert event["samples"] == [bad, bad + BATCH] and 0 < event["cost_s"] < 100 and "loss nan" in event["why"]
    meta = ckpt.open(ckpt.latest(trainer.run.checkpoints)).meta
    assert meta["health"] == {"left_out": [[bad, bad + BATCH]], "rewinds": 1}
    assert meta["data"]["next_sample"] == 13 * BATCH

    again = make("again", 12, *saves, "--train.max-rewinds", "2")
    poison(again, {bad + 5})
    again.fit()
    assert outcome(again) == outcome(trainer)
    # A run that never saw these samples has the same values: nothing of the bad steps is left.
    clean = make("clean", 12, *saves)
    clean.batches.train.leave_out([(bad, bad + BATCH)])
    clean.fit()
    assert outcome(clean) == outcome(trainer)


@pytest.mark.rest
@pytest.mark.parametrize(("bad", "back_to"), [(7, 6), (8, 8)], ids=["copy", "checkpoint"])
def test_an_elastic_run_goes_back_to_the_newest_of_copies_and_checkpoints(
    comm: Communicator, make: Make, bad: int, back_to: int
) -> None:
    elastic = ("--train.elastic", "true", "--train.copy-every", "3", *SAVES)
    trainer = make("run", 12, *elastic, "--train.max-rewinds", "1")
    seen = poison(trainer, {bad * BATCH + 5})
    trainer.fit()
    assert seen[bad : bad + 2] == [(bad, bad * BATCH), (back_to, (back_to + (back_to == bad)) * BATCH)]
    (event,) = faults(trainer.run.folder)
    assert event["to_step"] == back_to and 0 < event["cost_s"] < 100
    clean = make("clean", 12, *SAVES)
    clean.batches.train.leave_out([(bad * BATCH, (bad + 1) * BATCH)])
    clean.fit()
    assert outcome(clean) == outcome(trainer)
    lease = read_lease(trainer.run.folder)
    assert lease is not None and list(complete_copies(lease.run)) == []
    comm.barrier()
    if comm.node.rank == 0:
        remove_all(lease.run)  # the file by which the processes of the run hold its copies


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_a_second_rewind_goes_back_to_the_copy_after_the_first_one(comm: Communicator, make: Make) -> None:
    trainer = make("run", 12, "--train.elastic", "true", "--train.copy-every", "3", *SAVES, "--train.max-rewinds", "2")
    poison(trainer, {7 * BATCH + 5, 8 * BATCH + 5})
    trainer.fit()
    assert [event["to_step"] for event in faults(trainer.run.folder)] == [6, 6]
    clean = make("clean", 12, *SAVES)
    clean.batches.train.leave_out([(7 * BATCH, 9 * BATCH)])
    clean.fit()
    assert outcome(clean) == outcome(trainer)
    lease = read_lease(trainer.run.folder)
    comm.barrier()
    if comm.node.rank == 0 and lease is not None:
        remove_all(lease.run)


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_a_resume_keeps_what_was_left_out(make: Make) -> None:
    samples = {6 * BATCH, 9 * BATCH}
    args = (*SAVES, "--train.max-rewinds", "2", "--optim.min-lr-ratio", "1")
    whole, part = make("whole", 14, *args), make("part", 8, *args)
    for trainer in (whole, part):
        poison(trainer, samples)
        trainer.fit()
    rest = make("part", 14, *args)
    poison(rest, samples)
    rest.fit()
    assert outcome(rest) == outcome(whole)
    assert [event["samples"] for event in faults(rest.run.folder)] == [[72, 84], [108, 120]]
    last = make("part", 20, *args)
    poison(last, {16 * BATCH})
    with pytest.raises(FloatingPointError, match=r"step 15: loss nan, .*no step was taken"):  # no rewind is left
        last.fit()


@pytest.mark.ranks(1, 2)
def test_steps_that_may_be_skipped_come_first(make: Make) -> None:
    """Then all steps since the last one that was taken are bad, and after the last rewind the error is as without rewinds."""
    trainer = make("run", 12, *SAVES, "--train.max-rewinds", "1", "--train.max-skipped-steps", "1")
    seen = poison(trainer, {5 * BATCH, 6 * BATCH, 9 * BATCH, 10 * BATCH})
    with pytest.raises(FloatingPointError, match=r"step 9: loss nan, .*after 1 skipped steps.*no step was taken"):
        trainer.fit()
    (event,) = faults(trainer.run.folder)
    assert event["steps"] == [6, 7] and event["samples"] == [5 * BATCH, 7 * BATCH] and event["to_step"] == 4
    assert seen[7][0] == 4 and seen[8] == (5, 7 * BATCH)


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_a_checkpoint_that_leads_nowhere_is_passed_over(make: Make) -> None:
    """The parameters are not finite after step 4, whose checkpoint is complete. The second rewind goes back further."""
    trainer = make("run", 8, "--checkpoint.every", "2", "--train.max-rewinds", "2")
    save, spoiled = trainer.save, []

    def spoil_and_save() -> None:
        if trainer.step == 4 and not spoiled:
            spoiled.append(True)
            with torch.no_grad():
                for param in trainer.model.parameters():
                    param.fill_(math.inf)
        save()

    trainer.save = spoil_and_save  # type: ignore[method-assign]
    trainer.fit()
    assert [event["to_step"] for event in faults(trainer.run.folder)] == [4, 2]
    assert all(param.isfinite().all() for param in trainer.model.parameters())


@pytest.mark.rest
@pytest.mark.ranks(1, 2)
def test_a_crash_after_such_a_rewind_does_not_lead_back(make: Make) -> None:
    args = ("--checkpoint.every", "2", "--checkpoint.keep", "9", "--train.max-rewinds", "2")
    trainer = make("run", 8, *args)
    save, train_step = trainer.save, trainer.train_step
    saves: list[int] = []

    def spoil_and_save() -> None:
        saves.append(trainer.step)
        if saves == [2, 4]:
            with torch.no_grad():
                for param in trainer.model.parameters():
                    param.fill_(math.inf)
        save()

    def step_until_the_second_rewind() -> tuple[Any, bool]:
        if len(faults(trainer.run.folder)) == 2 and trainer.step == 2:
            raise KeyError("a crash")
        return train_step()

    trainer.save = spoil_and_save  # type: ignore[method-assign]
    trainer.train_step = step_until_the_second_rewind  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="a crash"):
        trainer.fit()
    again = make("run", 8, *args)
    seen = poison(again, set())
    again.fit()
    assert seen[0][0] == 2 and all(param.isfinite().all() for param in again.model.parameters())
    left_out = [[4 * BATCH, 6 * BATCH]]
    assert ckpt.open(ckpt.latest(again.run.checkpoints)).meta["health"] == {"left_out": left_out, "rewinds": 2}


@pytest.mark.ranks(2)
def test_fp16_goes_back_with_its_scale(make: Make) -> None:
    halves = ("--parallel.param-dtype", "float16", "--parallel.reduce-dtype", "float16")
    trainer = make("run", 8, *halves, "--train.max-rewinds", "1")
    poison(trainer, {3 * BATCH})
    trainer.fit()
    (event,) = faults(trainer.run.folder)
    assert event["to_step"] == 0 and trainer.stepper.loss_scale == 65536.0 and trainer.stepper.num_skipped == 0
