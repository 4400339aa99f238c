"""The loss by source of data is the mean over the rows of the source in the global batch, for any layout, and changes no bit."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import mpitrain
from collectives import Communicator
from mpitrain.job.config import Config, parse
from mpitrain.job.data.loading import load_data
from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.train.batches.losses import SourceLosses
from mpitrain.job.train.batches.rank_batches import RankBatches
from mpitrain.job.train.batches.totals import LossTotal
from mpitrain.job.train.evaluation import Evaluator
from mpitrain.job.train.model import make_model
from mpitrain.models import build
from mpitrain.models.loss import IGNORED

SIZES = "--model.width 24 --model.layers 4 --model.heads 2 --model.context 12 --train.batch 8 --train.accumulate 2"
# Rows of a lane follow each other in a batch; padding is in whole rows alone.
DATA = "--data.lanes 4 --data.packing whole --data.mask-documents false --data.processes 0 --data.heldout 0.2"
LAYOUTS = {1: "", 3: "", 4: "--parallel.tensor 2 --parallel.pipeline 2"}

CLOCK = StepClock(lambda: 0.0)


@pytest.fixture
def table(comm: Communicator, shared_tmp: Path) -> Path:
    """Two sources, each with the letter of its name alone."""
    if comm.rank == 0:
        tables = []
        for name, weight in (("a", 3), ("b", 1)):
            lines = [json.dumps({"text": name * (5 + number % 11)}) for number in range(400)]
            (shared_tmp / f"{name}.jsonl").write_text("\n".join(lines))
            path = shared_tmp / f"{name}.jsonl"
            tables.append(f'[[data.sources]]\nname = "{name}"\npath = ["{path}"]\nweight = {weight}')
        (shared_tmp / "run.toml").write_text("\n".join(tables))
    comm.barrier()
    return shared_tmp / "run.toml"


def expected(config: Config, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """The mean loss of the rows with each letter, by a plain model with the initial values."""
    model = build(config.model.resolve())
    mpitrain.initialize(model, seed=config.train.seed)
    found = {}
    tokens, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    for name in "ab":
        rows = (tokens == ord(name)).any(1)
        with torch.no_grad():
            found[name] = (
                model(tokens[rows], targets[rows], reduction="sum") / (targets[rows] != IGNORED).sum()
            ).item()
    return found


@pytest.mark.ranks(1, 3, 4)
def test_loss_by_source(comm: Communicator, table: Path) -> None:
    def total(*values: float) -> list[float]:
        return [float(value) for value in comm.all_reduce(np.array(values, np.float64))]

    layout = LAYOUTS[comm.size]
    words = f"{SIZES} {DATA} --train.eval-batches 2 --parallel.bind false {layout}".split()
    config = parse(["--config", str(table), *words])
    parallel, device = config.parallel, torch.device("cpu")
    mesh = mpitrain.mesh(comm, tp=parallel.tensor, pp=parallel.pipeline)
    found = load_data(config.data, comm, batch=config.train.batch)
    batches = RankBatches(config, found, mesh["dp_shard"], all_ranks=comm, same=mesh["pp", "tp"])
    alone = RankBatches(config, found, comm.split(comm.rank))
    model, passes = make_model(config, mesh, device)
    losses = SourceLosses(model, batches.sources, None)
    for step in range(3):
        of_step = batches.of_step(step)
        with losses.observing():
            loss = passes.train(of_step, lambda loss: loss, CLOCK)
        figures = losses.figures(total(*losses.sums(of_step)))
        assert torch.equal(loss, passes.train(of_step, lambda loss: loss, CLOCK)), "the same bits without an observer"
        whole = [(batch.tokens, batch.targets) for batch in alone.of_step(step)]
        means = {f"loss/{name}": value for name, value in expected(config, whole).items() if not math.isnan(value)}
        assert figures == pytest.approx(means, rel=1e-5), (layout, step)
    by_source = SourceLosses(model, batches.heldout_sources, None, figure="heldout_loss")
    evaluator = Evaluator(
        config.train, batches, passes, by_source, loss_total=LossTotal(None, mesh["pp", "tp"].size), total=total,
        is_alive=lambda: None, knows_text=True,
    )  # fmt: skip
    heldout = [batch for index in range(2) for batch in alone.of_evaluation(index)]
    means = expected(config, [(batch.tokens, batch.targets) for batch in heldout])
    evaluated = evaluator.evaluate().metrics()
    assert {name: evaluated[f"heldout_loss/{name}"] for name in "ab"} == pytest.approx(means, rel=1e-5), layout
    one = SourceLosses(model, ["data"], None)
    with one.observing():
        passes.evaluate(of_step)
    assert one.sums(of_step) == [] and one.figures([]) == {}
    mesh.free()
