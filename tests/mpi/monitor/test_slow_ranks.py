"""Slow ranks of real runs."""

import os
import platform
import time
from typing import Any

import pytest
from other_load import OtherLoad
from run_events import faults
from small_trainers import Make

from collectives import Communicator
from mpitrain.job.record import stragglers
from mpitrain.job.train.trainer import Trainer

pytestmark = pytest.mark.rest

LAYOUTS = [
    pytest.param((), "blocked", marks=pytest.mark.ranks(1, 2), id="ZeRO"),
    pytest.param((), "data", marks=pytest.mark.ranks(2), id="slow data"),
    pytest.param(
        ("--parallel.pipeline", "2", "--parallel.tensor", "2", "--train.accumulate", "2", "--model.layers", "3"),
        "blocked",
        marks=pytest.mark.ranks(4),
        id="pipeline of cut stages",
    ),
]


def slow_down(trainer: Trainer, steps: range, seconds: float, cause: str) -> None:
    """This rank takes longer in these steps (from 0)."""
    owner, name = (trainer.batches, "prepare") if cause == "data" else (trainer.passes, "train")
    call = getattr(owner, name)

    def later(*args: Any) -> Any:
        if trainer.step in steps:
            time.sleep(seconds)
        return call(*args)

    setattr(owner, name, later)


@pytest.mark.parametrize(("args", "cause"), LAYOUTS)
def test_a_slow_rank_is_named_and_not_those_that_wait_for_it(
    comm: Communicator,
    make: Make,
    args: tuple[str, ...],
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last rank sleeps in 15 steps. A rank alone has nobody to compare itself with.

    A busy machine may hold another rank for one of these steps, and the slow rank is then named a second time: so 7 of them in a row.
    Ranks that share a core, with each other or with another process, use it while they wait for each other. Then a rank that sleeps
    may seem to compute.
    """
    load = OtherLoad()
    monkeypatch.setattr(stragglers, "LEAST_S", 1.0)
    monkeypatch.setattr(stragglers, "IN_A_ROW", 7)
    trainer = make("run", 25, *args)
    slow = comm.size - 1
    if comm.rank == slow:
        slow_down(
            trainer, range(5, 20), 0.1 * comm.size, cause
        )  # more than ranks that share a core wait for each other
    trainer.fit()
    num_busy = comm.size + load.cores(sum(comm.all_gather_object(load.own_s())))
    has_cores = num_busy < len(os.sched_getaffinity(0)) + 0.2
    events = faults(trainer.run.folder)
    if comm.size == 1:
        assert events == []
        return
    assert events
    for event in events:
        assert (event["event"], event["rank"], event["host"]) == ("straggler", slow, platform.node())
        assert event["factor"] > stragglers.FACTOR and event["cost_s"] > 0.5
        assert event["cause"] in {cause} | (set() if has_cores else {"compute", "cpu"})
    if comm.rank == 0:
        assert f"rank {slow} on {platform.node()} takes " in capsys.readouterr().out
