"""The main job's steps that are left out, and fp16: on all ranks alike, in the log, and over a stop and a resume."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tensors

import ckpt
from collectives import Communicator
from mpitrain.config import parse
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.ranks(1, 2)

BATCH = 12

SETTINGS = """
    --model.width 32 --model.layers 1 --model.heads 2 --model.context 16 --train.batch 12 --train.eval-batches 0
    --train.sample-bytes 0 --optim.warmup-steps 2 --log.every 100 --checkpoint.every 0 --parallel.no-bind --parallel.threads 1
"""
FP16 = ["--parallel.param-dtype", "float16", "--parallel.reduce-dtype", "float16"]
Make = Callable[..., Trainer]


@pytest.fixture
def make(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A trainer of so many steps in a run of that name."""
    monkeypatch.setenv("MPITRAIN_RECORD_DIR", str(shared_tmp))
    monkeypatch.setenv("MPITRAIN_TTY", "0")
    if comm.rank == 0:
        rng = np.random.default_rng(0)
        (shared_tmp / "text").write_bytes(b" ".join(rng.choice([b"node", b"rank", b"shard", b"unit"], 4000)))
    comm.barrier()

    def make(run: str, steps: int, *args: str) -> Trainer:
        paths = ["--data.path", str(shared_tmp / "text"), "--run", str(shared_tmp / run)]
        return Trainer(parse([*SETTINGS.split(), *paths, "--train.steps", str(steps), *args]), comm)

    return make


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
    loss = trainer._loss

    def poisoned(rows: np.ndarray) -> torch.Tensor:
        here = trainer.step in steps and trainer.comm.rank == rank % trainer.comm.size
        return loss(rows) * value if here else loss(rows)

    trainer._loss = poisoned  # type: ignore[method-assign]


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
    loss = trainer._loss
    trainer._loss = lambda rows: _infinite(loss(rows))  # type: ignore[method-assign]
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
