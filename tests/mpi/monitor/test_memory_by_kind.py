"""The memory of a rank by kind, beside what `python -m mpitrain memory` predicts."""

import gc
from math import prod

import pytest
import torch

import mpitrain
from collectives import Communicator
from mpitrain.job.config import parse
from mpitrain.job.record.gauges.gauges import Gauges
from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.model import make_model, make_optimizer
from mpitrain.sharding import sharded_params
from mpitrain.tools.plan.memory.prediction import predict

pytestmark = pytest.mark.rest

SETTINGS = "--model.width 64 --model.layers 3 --model.heads 4 --model.context 16 --train.batch 4 --parallel.bind false"

CLOCK = StepClock(lambda: 0.0)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("stage", "storage"), [(0, "auto"), (2, "private"), (3, "resident"), (3, "private")])
def test_kinds(comm: Communicator, stage: int, storage: str) -> None:
    config = parse([*SETTINGS.split(), "--parallel.stage", str(stage), "--parallel.storage", storage])
    gc.collect()  # the node memory of tests before
    mesh, device = mpitrain.mesh(comm), torch.device("cpu")
    model, passes = make_model(config, mesh, device)
    optimizer = make_optimizer(model, config.optim)
    gauges = Gauges(model, optimizer, device)
    before = gauges.sample()
    assert before["memory/gradients_bytes"] == before["memory/optimizer_bytes"] == 0
    rows = torch.zeros(4 // comm.size, 17, dtype=torch.int64)
    passes.train([MicroBatch(rows[:, :-1], rows[:, 1:])], lambda loss: loss, CLOCK)
    optimizer.step()
    found = {name: value for name, value in gauges.sample().items() if name.startswith("memory/")}
    held = 4 * sum(param.numel() for param in model.parameters())
    total = 4 * sum(prod(param.box.full_shape) for param in sharded_params(model))
    predicted = predict(config, comm.size).rank
    assert found["memory/gradients_bytes"] == held
    assert found["memory/optimizer_bytes"] == pytest.approx(2 * held, rel=0.01), "with the numbers of steps"
    if storage == "resident":
        assert found["memory/parameters_bytes"] == 0
        assert found["memory/shared_bytes"] >= total / comm.size
    elif (stage, comm.size) == (3, 2):
        assert found["memory/parameters_bytes"] == held, "what is gathered is free now"
    else:
        assert found["memory/parameters_bytes"] == pytest.approx(
            predicted["parameters"] + predicted["full parameters"], rel=0.01
        ), "with padding"
    everywhere = [sum(values) for values in zip(*comm.all_gather_object(list(found.values())), strict=True)]
    assert min(everywhere) >= 0 and found["memory/other_bytes"] > 50e6, "Python and torch"
    mesh.free()
