"""The records of steps: each action once, in the order of the program, with the time that it took; and the picture of them."""

import time
from pathlib import Path

import pytest
import torch
from extent import extent

from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.stages import Pipeline, pipeline

MICRO, SLOW_S = 8, 0.02
SCHEDULES = extent(["1f1b", "zb-v"], ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])


def made(comm: Communicator, schedule: str) -> Pipeline:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=50, context=16, width=24, layers=8, heads=2, tied=False))
    return pipeline(model, comm, schedule, micro_batches=MICRO)


def steps(pipe: Pipeline, count: int) -> None:
    tokens = [torch.randint(0, 50, (2, 8)) for _ in range(MICRO)]
    for _ in range(count):
        pipe.step(tokens, last=[{"targets_BL": rows} for rows in tokens])
        pipe.evaluate(tokens[:3], last=[{"targets_BL": rows} for rows in tokens[:3]])


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_records_are_those_of_the_programs(comm: Communicator, schedule: str) -> None:
    pipe = made(comm, schedule)
    with pytest.raises(ValueError, match="no step has run"):
        pipe.measured()
    for num_steps, num_kept in ((1, 1), (1, 1), (1, 2), (8, 8)):  # the second step replaces the first
        steps(pipe, num_steps)
        measured = pipe.measured()
        assert len(measured.steps) == num_kept
    assert comm.all_gather_object(measured.times()) == [measured.times()] * comm.size
    for run, stop in zip(measured.steps, measured.stops, strict=True):
        begun_of = {}
        for rank in range(comm.size):
            program, begun, ended = run.programs[rank], run.begun[rank], run.ended[rank]
            assert program == pipe.schedule.program(rank)
            assert len(begun) == len(ended) == len(program) == len(set(program))
            moments = [moment for pair in zip(begun, ended, strict=True) for moment in pair]
            assert moments == sorted(moments)
            assert 0 <= moments[0] < moments[-1] <= stop
            begun_of.update(zip(program, begun, strict=True))
        for rank in range(comm.size) if comm.num_nodes == 1 else ():
            for action, begun_s in zip(run.programs[rank], run.begun[rank], strict=True):
                for needed in pipe.schedule.needed(action):
                    assert begun_of.get(needed, 0.0) < begun_s, "an action begins before the one whose result it needs"
    assert 0 <= sum(measured.idle()) <= 1
    assert measured.between > 0


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
def test_times_of_a_slow_stage(comm: Communicator, shared_tmp: Path) -> None:
    pipe = made(comm, "1f1b")
    if comm.rank == 1:
        next(pipe.stages.model.blocks.children()).register_forward_hook(lambda *_: time.sleep(SLOW_S))
    steps(pipe, 3)
    times = pipe.times()
    assert [stage.keys() for stage in times.stages] == [{"F", "B"}] * comm.size
    assert times.stages[1]["F"] >= SLOW_S
    assert times.message >= 0
    measured = pipe.measured()
    assert measured.planned().total >= MICRO * SLOW_S
    pipe.draw(shared_tmp / "pipeline.svg")
    assert (shared_tmp / "pipeline.svg").read_text().count("<title>") == 2 * 2 * MICRO * comm.size
