"""Figures by layer are those of the plain model in one process, for any layout, and do not change a bit of the training."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
import torch

import mpitrain
from collectives import Communicator
from mpitrain.job.config import Config, parse
from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.record.layers.figures import LayerFigures
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.model import make_model, make_optimizer
from mpitrain.job.train.steps.stepper import Stepper
from mpitrain.models import LanguageModel, build, decay_groups
from mpitrain.models.loss import IGNORED
from mpitrain.optim.elementwise import AdamW
from mpitrain.weights.initial_values import initialize

pytestmark = pytest.mark.rest

SIZES = "--model.width 24 --model.layers 4 --model.heads 3 --model.context 12 --model.vocab 257 --train.batch 8"
# With a norm of gradients far above optim.clip_norm. The large eps: else the update is 1 or -1 even for elements of rounding errors.
OPTIM = "--optim.clip-norm 0.1 --optim.eps 1e-3 --optim.warmup-steps 0 --train.accumulate 2 --parallel.bind false"
STEPS = 3

LAYOUTS = {
    1: ["--parallel.stage 3"],
    2: [
        "--parallel.stage 0",
        "--parallel.stage 1 --parallel.storage private",
        "--parallel.stage 3 --parallel.reduce-dtype float16",
        "--parallel.tensor 2 --model.tied false",
        "--parallel.pipeline 2 --parallel.stage 2",
    ],
    3: ["--parallel.stage 3 --parallel.storage private"],
    4: [
        "--parallel.stage 2 --parallel.copies 2",
        "--parallel.tensor 2 --parallel.pipeline 2 --model.family llama --model.heads 4 --model.kv-heads 1",
        "--parallel.pipeline 2 --parallel.schedule zb-v --model.family llama --model.tied true",
    ],
}

CLOCK = StepClock(lambda: 0.0)


class Trained(NamedTuple):
    losses: list[float]
    figures: list[dict[str, float]]
    params: list[torch.Tensor]


def micro_batches(step: int, number: int = 0, size: int = 1) -> list[MicroBatch]:
    """Part `number` of `size` of a global batch, in two micro-batches, with some targets that do not count."""
    rows = torch.randint(0, 40, (8, 13), generator=torch.Generator().manual_seed(step))
    mine = rows[len(rows) * number // size : len(rows) * (number + 1) // size]
    targets = mine[:, 1:].clone()
    targets[:, 3] = IGNORED
    half = len(mine) // 2
    return [MicroBatch(mine[at, :-1], targets[at]) for at in (slice(half), slice(half, None))]


def train(config: Config, comm: Communicator, *, every: int) -> Trained:
    parallel = config.parallel
    mesh = mpitrain.mesh(comm, tp=parallel.tensor, pp=parallel.pipeline, dp_replicate=parallel.copies)
    data = mesh["dp_replicate", "dp_shard", "cp"]
    model, passes = make_model(config, mesh, torch.device("cpu"))
    optimizer = make_optimizer(model, config.optim)
    stepper = Stepper(model, optimizer, config)

    def total(*values: float) -> list[float]:
        return [float(value) for value in comm.all_reduce(np.array(values, np.float64))]

    layers = LayerFigures(model, every=every, total=total)
    losses, figures = [], []
    for step in range(1, STEPS + 1):
        batches = micro_batches(step, data.rank, data.size)
        num = total(sum(batch.num_counted for batch in batches))[0]
        optimizer.zero_grad()
        wanted = layers.begin(step)
        assert wanted == bool(every and step % every == 0)
        loss = passes.train(batches, lambda loss, num=num: stepper.scale(loss * comm.size / num), CLOCK)  # type: ignore[misc]
        if wanted:
            layers.after_backward(stepper.loss_scale)
        grad_norm = stepper.clip()
        losses.append(total(loss.sum().item())[0] / num)
        assert stepper.step(losses[-1], grad_norm, number=step)
        if wanted:
            figures.append(layers.end())
            norms = [value for name, value in figures[-1].items() if name.startswith("grad_norm/")]
            assert math.hypot(*norms) == pytest.approx(grad_norm, rel=1e-5)
    params = [param.detach().clone() for param in model.parameters()]
    mesh.free()
    return Trained(losses, figures, params)


def reference(config: Config) -> list[dict[str, float]]:
    """The figures of each step of a plain model."""
    model: LanguageModel = build(config.model.resolve())
    initialize(model, seed=config.train.seed)
    optimizer = AdamW(
        decay_groups(model, 0.1), lr=config.optim.resolve().lr, betas=config.optim.betas, eps=config.optim.eps
    )
    found = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        batches = micro_batches(step)
        num = sum(batch.num_counted for batch in batches)
        for batch in batches:
            (model(batch.tokens, batch.targets, reduction="sum") / num).backward()
        with torch.no_grad():
            probs = torch.cat([model(each.tokens)[each.targets != IGNORED] for each in batches]).double().softmax(1)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
        figures = {"logit_entropy": -(probs * probs.log()).sum(1).mean().item()}
        layers = {"embedding": ("wte.", "wpe."), "head": ("ln_f.", "norm.", "head.")}
        layers |= {f"blocks.{index}": (f"blocks.{index}.",) for index in range(4)}
        for layer, prefixes in layers.items():
            names = [name for name in before if name.startswith(prefixes)]
            grad, old = flat(grads[name] for name in names), flat(before[name] for name in names)
            new = flat(model.get_parameter(name).detach() for name in names)
            figures[f"grad_norm/{layer}"] = grad.norm().item()
            figures[f"param_norm/{layer}"] = old.norm().item()
            figures[f"update_ratio/{layer}"] = ((new - old).norm() / old.norm()).item()
            figures[f"zeros/{layer}"] = (grad == 0).double().mean().item()
        found.append(figures)
    return found


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


@pytest.mark.ranks(1, 2, 3, 4)
def test_figures_are_those_of_the_plain_model(comm: Communicator) -> None:
    for layout in LAYOUTS[comm.size]:
        config = parse([*SIZES.split(), *OPTIM.split(), *layout.split()])
        with_figures, without = train(config, comm, every=2), train(config, comm, every=0)
        assert with_figures.losses == without.losses and without.figures == [], layout
        assert all(map(torch.equal, with_figures.params, without.params)), layout
        (found,) = with_figures.figures
        assert comm.all_gather_object(found) == [found] * comm.size, layout
        (expected,) = reference(config)[1:2]
        assert found.keys() == expected.keys(), layout
        # Halves in reductions round to 11 bits; small gradients become zeros. Else float32's sums are in another order.
        rel = 2e-3 if "float16" in layout else 1e-4
        for name, value in expected.items():
            zeros = name.startswith("zeros/")
            assert found[name] == pytest.approx(value, rel=rel, abs=0.01 if zeros else 0), (layout, name)
        if "tied false" in layout:
            assert found["zeros/embedding"] > 0.5, "the rows of tokens that the batch does not have"
