"""The main job with local steps: stops and resumes, steps that are not finite in one copy, and copies that must be the same."""

from pathlib import Path

import pytest
import torch
from main_job import assert_same_end, heldout_losses, losses, metrics
from small_trainers import Make, fails_at, flip, in_step, maker

from collectives import Communicator
from mpitrain.job.health import DesyncError
from mpitrain.job.train.trainer import Trainer

pytestmark = pytest.mark.ranks(2, 4)

STEPS = 9  # outer steps after 5, 8, and after the last
LOCAL = (
    *("--parallel.copies", "2", "--parallel.local-steps", "3", "--parallel.exact-steps", "2"),
    *("--train.check-every", "1"),
)
EVALUATED = ("--train.eval-batches", "2", "--train.eval-every", "2", "--checkpoint.every", "7")


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes small trainers in the test's folder."""
    return maker(comm, shared_tmp, monkeypatch)


def own(trainer: Trainer) -> torch.Tensor:
    """The first parameter of which this rank has rows."""
    return next(param for param in trainer.model.parameters() if param.numel())


@pytest.mark.rest
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--parallel.stage 0 --parallel.param-dtype float16 --train.accumulate 2 --train.batch 16",
        "--parallel.tensor 2",
        "--parallel.pipeline 2 --train.accumulate 2",
    ],
)
def test_a_job_that_stops_between_outer_steps_goes_on_with_the_same_bits(
    make: Make, comm: Communicator, more: str
) -> None:
    if ("tensor" in more or "pipeline" in more) and comm.size < 4:
        pytest.skip("two copies of two ranks need four")
    words = [*LOCAL, *EVALUATED, *more.split()]
    undisturbed = make("undisturbed", STEPS, *words)
    undisturbed.fit()
    stopped = make("stopped", STEPS, *words)
    fails_at(stopped, 7)
    with pytest.raises(ValueError, match="on purpose"):
        stopped.fit()
    make("stopped", STEPS, *words).fit()
    assert_same_end(undisturbed.run.folder, stopped.run.folder)
    assert len(losses(stopped.run.folder)) == STEPS and len(heldout_losses(stopped.run.folder)) == 5
    assert undisturbed.diloco is not None and not undisturbed.diloco.is_apart
    evaluated = heldout_losses(undisturbed.run.folder)
    assert evaluated[2] != evaluated[1], "after 4 steps the outer parameters are those after 2, after 6 those after 5"


def test_a_copy_that_is_not_finite_makes_all_copies_skip(make: Make, comm: Communicator) -> None:
    trainer = make("skips", STEPS, *LOCAL, "--train.max-skipped-steps", "1")

    def spoil() -> None:
        if comm.rank == 0:
            own(trainer).grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]

    in_step(trainer, 4, spoil)
    trainer.fit()
    lines = metrics(trainer.run.folder)
    assert [line["step"] for line in lines if line.get("skipped")] == [4]
    counts = {state["step"].item() for state in trainer.optimizer.state.values()}
    assert set().union(*comm.all_gather_object(counts)) == {STEPS - 1}


@pytest.mark.parametrize("step", [2, 4])
def test_outer_parameters_that_differ_between_copies_end_the_run(make: Make, comm: Communicator, step: int) -> None:
    """In exact steps the parameters themselves are compared, in local steps the outer ones."""
    trainer = make("flipped", STEPS, *LOCAL)

    def spoil() -> None:
        assert trainer.diloco is not None
        if comm.rank == comm.size - 1:
            values = list(trainer.diloco.outer.values()) if trainer.diloco.is_local else [own(trainer)]
            flip(next(each for each in values if each.numel()))
            trainer.health._resting.forget()  # else the rank itself would find the bit first

    in_step(trainer, step, spoil)
    with pytest.raises(DesyncError, match="outer parameters of" if step > 2 else "model/"):
        trainer.fit()
