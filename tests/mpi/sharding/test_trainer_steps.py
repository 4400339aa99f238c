"""The main job's steps: their loss, steps that are left out, and fp16; on all ranks alike, in the log, and over a stop and a resume."""

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from checkpoints import tensors
from small_trainers import Make, maker

import ckpt
from collectives import Communicator
from mpitrain import tensor
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.passes import WholePasses
from mpitrain.job.train.steps.lr import learning_rate
from mpitrain.job.train.trainer import Trainer
from mpitrain.models import GPT
from mpitrain.models.loss import IGNORED
from mpitrain.weights.initial_values import initialize

pytestmark = pytest.mark.ranks(1, 2)

BATCH = 12

FP16 = ["--parallel.param-dtype", "float16", "--parallel.reduce-dtype", "float16"]


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A trainer of so many steps in a run of that name."""
    return maker(comm, shared_tmp, monkeypatch)


def lines(trainer: Trainer) -> list[dict[str, Any]]:
    """What metrics.jsonl says of each step; it is JSON to the letter, which knows no NaN."""
    trainer.comm.barrier()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = trainer.run.metrics.read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def values(trainer: Trainer) -> list[torch.Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


def poison(trainer: Trainer, steps: set[int], *, value: float = math.nan, rank: int = -1) -> None:
    """The loss of one rank, in those steps (the first is 0), is not finite."""
    passes = cast(WholePasses, trainer.passes)
    loss = passes._loss

    def poisoned(batch: MicroBatch) -> torch.Tensor:
        here = trainer.step in steps and trainer.comm.rank == rank % trainer.comm.size
        return loss(batch) * value if here else loss(batch)

    passes._loss = poisoned  # type: ignore[method-assign]


# The loss


def masked(batch: MicroBatch) -> MicroBatch:
    """Of each row another number of targets counts, of some rows none."""
    length = batch.targets.shape[1]
    num_kept = batch.tokens.sum(1, keepdim=True) % (length + 1) * (batch.tokens[:, :1] % 3 > 0)
    return MicroBatch(batch.tokens, batch.targets.masked_fill(torch.arange(length) >= num_kept, IGNORED))


def mask(trainer: Trainer) -> list[int]:
    """Mask the trainer's targets; returns a list that gets the number of targets that count on this rank, for each step."""
    batches, counts = trainer.batches, []
    of_step, of_evaluation = batches.of_step, batches.of_evaluation

    def masked_step(step: int) -> list[MicroBatch]:
        found = [masked(batch) for batch in of_step(step)]
        counts.append(sum(batch.num_counted for batch in found))
        return found

    batches.of_step = masked_step  # type: ignore[method-assign]
    batches.of_evaluation = lambda index: [masked(batch) for batch in of_evaluation(index)]  # type: ignore[method-assign]
    return counts


def plain_figures(trainer: Trainer) -> tuple[list[float], list[float], float]:
    """Losses and norms of the steps, and the last held-out loss, of one process with torch's own mean over the global batch."""
    config = trainer.config
    model = GPT(config.model.resolve())
    initialize(model, seed=config.train.seed)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if (p.ndim > 1) == is_matrix], "weight_decay": 0.1 * is_matrix}
        for is_matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.optim.betas)

    def logits_and_targets(*batches: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        some = [masked(batch) for batch in batches]
        return torch.cat([model(b.tokens).flatten(0, 1) for b in some]), torch.cat([b.targets.flatten() for b in some])

    def micro(rows: np.ndarray) -> MicroBatch:
        return MicroBatch(torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:]))

    losses, norms = [], []
    for step in range(config.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(*logits_and_targets(micro(trainer.batches.train.get(step, range(BATCH)))))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, config.optim.clip_norm).item())
        optimizer.step()
        losses.append(loss.item())
    heldout = trainer.batches.heldout
    with torch.no_grad():
        evaluated = [micro(heldout.get(index, range(BATCH))) for index in range(heldout.num_batches)]
        return losses, norms, F.cross_entropy(*logits_and_targets(*evaluated)).item()


@pytest.mark.parametrize(
    "args",
    [(), ("--train.accumulate", "3"), pytest.param(("--parallel.tensor", "2"), marks=pytest.mark.ranks(4))],
    ids=" ".join,
)
def test_each_token_that_counts_has_the_same_weight(comm: Communicator, make: Make, args: tuple[str, ...]) -> None:
    """However many of them a rank or a micro-batch has: the loss is the mean over the whole batch."""
    trainer = make("run", 5, "--train.eval-batches", "2", *args)
    counts = mask(trainer)
    trainer.fit()
    of_ranks = comm.all_gather_object(counts)
    if comm.size > 1:
        assert all(len(set(of_step)) > 1 for of_step in zip(*of_ranks, strict=True)), of_ranks
    entries = lines(trainer)
    losses, norms, heldout = plain_figures(trainer)
    np.testing.assert_allclose([e["loss"] for e in entries if "loss" in e], losses, rtol=1e-6)
    np.testing.assert_allclose([e["grad_norm"] for e in entries if "loss" in e], norms, rtol=1e-4)
    np.testing.assert_allclose([e["heldout_loss"] for e in entries if "heldout_loss" in e], [heldout], rtol=1e-6)


@pytest.mark.ranks(2)
def test_seconds_in_regions_are_seconds_in_communication(make: Make) -> None:
    trainer = make("run", 2, "--parallel.tensor", "2")
    take, steps = trainer.train_step, []

    def train_step() -> Any:
        before = tensor.communication_s(trainer.model)
        taken, stopped = take()
        steps.append((tensor.communication_s(trainer.model) - before, taken.comm_s, taken.step_s))
        return taken, stopped

    trainer.train_step = train_step  # type: ignore[method-assign]
    trainer.fit()
    assert all(0 < in_regions < comm_s < step_s for in_regions, comm_s, step_s in steps), steps


def ignore_all(trainer: Trainer, steps: set[int]) -> None:
    """No target counts in those steps (the first is 0), nor in an evaluation."""
    of_step, of_evaluation = trainer.batches.of_step, trainer.batches.of_evaluation

    def ignored(batch: MicroBatch) -> MicroBatch:
        return batch._replace(targets=torch.full_like(batch.targets, IGNORED))

    trainer.batches.of_step = lambda step: [  # type: ignore[method-assign]
        ignored(batch) if step in steps else batch for batch in of_step(step)
    ]
    trainer.batches.of_evaluation = lambda index: [ignored(batch) for batch in of_evaluation(index)]  # type: ignore[method-assign]


@pytest.mark.rest
@pytest.mark.parametrize("args", [[], FP16], ids=["fp32", "fp16"])
def test_a_step_in_which_no_token_counts(make: Make, args: list[str]) -> None:
    args = ["--train.eval-batches", "1", *args]
    strict = make("strict", 4, *args)
    ignore_all(strict, {2})
    with pytest.raises(
        FloatingPointError, match=r"step 3: no target of the global batch counts \(all are -100\).*no step"
    ):
        strict.fit()
    trainer = make("run", 4, "--train.max-skipped-steps", "1", *args)
    ignore_all(trainer, {2})
    trainer.fit()
    entries = lines(trainer)
    assert [entry.get("skipped") for entry in entries] == [None, None, True, None, None]
    assert [entry.get("loss", 0.0) is None for entry in entries] == [False, False, True, False, False]
    assert entries[2]["grad_norm"] == 0.0 and entries[-1]["heldout_loss"] is None
    assert all(entry.get("loss_scale", 65536.0) == 65536.0 for entry in entries), "nothing overflowed"


# Steps that are left out


@pytest.mark.parametrize(
    ("value", "way"),
    [(math.nan, []), (math.inf, ["--parallel.storage", "private"]), (math.nan, ["--parallel.stage", "0"])],
)
def test_a_loss_of_one_rank_that_is_not_finite(
    make: Make, value: float, way: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make("run", 6, "--train.max-skipped-steps", "2", *way)
    poison(trainer, {1, 3, 4}, value=value)
    before: list[list[torch.Tensor]] = []
    take = trainer.train_step

    def train_step() -> Any:
        before.append(values(trainer))
        return take()

    trainer.train_step = train_step  # type: ignore[method-assign]
    trainer.fit()
    before.append(values(trainer))
    for step in range(6):
        same = all(torch.equal(a, b) for a, b in zip(before[step], before[step + 1], strict=True))
        assert same == (step in (1, 3, 4)), step
    assert all(param.isfinite().all() for param in before[-1])
    entries = lines(trainer)
    assert [entry.get("skipped") for entry in entries] == [None, True, None, True, True, None]
    assert [entry["loss"] is None for entry in entries] == [False, True, False, True, True, False]
    assert all("loss_scale" not in entry for entry in entries)
    if trainer.comm.rank == 0:
        said = capsys.readouterr().out
        assert said.count("  skipped: gradient norm nan") == 3, said
        assert "3 of 6 steps were skipped: their loss or gradient was not finite" in said


def test_too_many_in_a_row_are_an_error_of_all_ranks(make: Make) -> None:
    trainer = make("run", 9, "--train.max-skipped-steps", "2")
    poison(trainer, {0, 2, 3, 4})
    with pytest.raises(
        FloatingPointError, match=r"step 5: loss nan, .* after 2 skipped steps of this kind .*no step was"
    ):
        trainer.fit()
    assert [entry["step"] for entry in lines(trainer)] == [1, 2, 3, 4]
    alone = make("other", 9)
    poison(alone, {1})
    with pytest.raises(FloatingPointError, match="step 2: loss nan, gradient norm nan; no step was taken"):
        alone.fit()


def test_a_poisoned_parameter_ends_the_run(make: Make) -> None:
    trainer = make("run", 9, "--train.max-skipped-steps", "3")
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.fill_(math.inf)
    with pytest.raises(FloatingPointError, match="step 4: loss nan"):
        trainer.fit()
    assert trainer.stepper.num_skipped == 3


def test_fp16_learns_as_fp32_does(make: Make) -> None:
    half, full = make("half", 20, *FP16), make("full", 20)
    half.fit()
    full.fit()
    mine, theirs = lines(half), lines(full)
    # fp16 has 11 bits: each activation is off by up to 0.05 %. Measured: up to 0.003.
    np.testing.assert_allclose([e["loss"] for e in mine], [e["loss"] for e in theirs], rtol=0, atol=0.02)
    np.testing.assert_allclose(mine[0]["grad_norm"], theirs[0]["grad_norm"], rtol=0.01)
    assert theirs[-1]["loss"] < theirs[0]["loss"] - 0.5
    assert {entry["loss_scale"] for entry in mine} == {65536.0}
    assert not any("loss_scale" in entry or "skipped" in entry for entry in theirs)


@pytest.mark.rest
@pytest.mark.parametrize("dtypes", [FP16, FP16[:2], FP16[2:]], ids=["both", "computed", "reduced"])
def test_overflows_halve_the_scale_and_a_resume_knows_of_it(
    make: Make, dtypes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    huge = 2.0**21 if "--parallel.param-dtype" in dtypes else 2.0**26  # such that some steps overflow

    def trainer_of(run: str, steps: int) -> Trainer:
        trainer = make(
            run, steps, *dtypes, "--optim.min-lr-ratio", "1"
        )  # so that the rate does not tell of the steps to come
        assert trainer.stepper._scaler is not None
        trainer.stepper._scaler.value, trainer.stepper._scaler._interval = huge, 3
        return trainer

    whole, part = trainer_of("whole", 12), trainer_of("part", 7)
    whole.fit()
    part.fit()
    rest = trainer_of("part", 12)
    rest.fit()
    expected, entries = lines(whole), lines(rest)
    keys = ("step", "loss", "lr", "grad_norm", "loss_scale", "skipped")
    assert [[e.get(key) for key in keys] for e in entries] == [[e.get(key) for key in keys] for e in expected]
    assert tensors(ckpt.latest(rest.run.checkpoints)) == tensors(ckpt.latest(whole.run.checkpoints))
    assert rest.stepper.state_dict() == whole.stepper.state_dict()
    scale, good = huge, 0
    for entry in expected:
        assert entry["loss_scale"] == scale
        assert entry["loss"] is not None
        if entry.get("skipped"):
            assert entry["grad_norm"] is None
            scale, good = scale / 2, 0
        else:
            good += 1
            scale, good = (scale * 2, 0) if good == 3 else (scale, good)
    assert any(entry.get("skipped") for entry in expected) and not all(entry.get("skipped") for entry in expected)
    if whole.comm.rank == 0:
        assert f" at loss scale {huge:g}\n" in capsys.readouterr().out


def test_a_scale_that_comes_to_nothing_is_an_error(make: Make) -> None:
    trainer = make("run", 40, *FP16)
    passes = cast(WholePasses, trainer.passes)
    loss = passes._loss
    passes._loss = lambda batch: _infinite(loss(batch))  # type: ignore[method-assign]
    with pytest.raises(
        FloatingPointError, match=r"step 31: loss 5\.\d+, .* in float16, even with the loss scaled by 6.1e-05"
    ):
        trainer.fit()
    assert trainer.stepper.num_skipped == 30


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * math.inf


_infinite = _Infinite.apply
