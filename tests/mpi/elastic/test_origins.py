"""A job that has started from a checkpoint of the user's choice goes on from its own states after a loss, and from no others."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_trainers import Make, fails_at, maker

from collectives import Communicator
from mpitrain.job.elastic.copies.holding import remove_all
from mpitrain.job.elastic.lease import read_lease
from mpitrain.job.train.trainer import Trainer

pytestmark = pytest.mark.rest

ELASTIC = ("--train.elastic", "true", "--train.copy-every", "3")


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes small trainers in the test's folder."""
    return maker(comm, shared_tmp, monkeypatch)


def again(failed: Trainer) -> Trainer:
    """The trainer of the next attempt of the job whose attempt has failed, on the same ranks."""
    assert failed._lasting is not None
    failed._lasting.origin = failed.config.resume
    return Trainer(replace(failed.config, resume="auto"), failed.comm, failed._lasting)


def started_after(trainer: Trainer) -> int:
    """The number of steps done before the first one of a run, which ends well."""
    steps = fails_at(trainer, -1)
    trainer.fit()
    trainer.comm.barrier()
    if trainer.comm.node.rank == 0 and (lease := read_lease(trainer.run.folder)) is not None:
        remove_all(lease.run)
    return steps[0]


def test_its_copies_count_although_the_first_checkpoint_has_a_later_lease_of_another_run(make: Make) -> None:
    for steps in (4, 8):
        make("a", steps, *ELASTIC).fit()
    first = make("b", 20, *ELASTIC, "--resume", str(make("a", 8).run.checkpoint(8)))
    fails_at(first, 16)
    with pytest.raises(ValueError, match="on purpose"):
        first.fit()
    assert started_after(again(first)) == 15


def test_it_does_not_go_on_from_a_later_state_that_the_user_has_left(make: Make) -> None:
    make("a", 8, *ELASTIC, "--checkpoint.every", "4").fit()
    first = make("a", 12, *ELASTIC, "--resume", str(make("a", 8).run.checkpoint(4)))
    fails_at(first, 5)
    with pytest.raises(ValueError, match="on purpose"):
        first.fit()
    assert started_after(again(first)) == 4
