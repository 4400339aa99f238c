"""Trainers of the main job for tests that run within pytest: a model of some thousand parameters, a text that the tests make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator
from mpitrain.job.config import parse
from mpitrain.job.train.endurance import Lasting
from mpitrain.job.train.trainer import Trainer

SETTINGS = """
    --model.width 32 --model.layers 1 --model.heads 2 --model.context 16 --train.batch 12 --train.eval-batches 0
    --train.sample-bytes 0 --optim.warmup-steps 2 --log.every 1000 --checkpoint.every 0 --parallel.no-bind --parallel.threads 1
"""
Make = Callable[..., Trainer]
"""A trainer of so many steps in a run of that name: `make("run", 10, "--train.seed", "3")`."""


def maker(comm: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes trainers whose runs are in `folder`, which all ranks share."""
    monkeypatch.setenv("MPITRAIN_RECORD_DIR", str(folder))
    monkeypatch.setenv("MPITRAIN_TTY", "0")
    # only the reference for `mfu`, which takes longer than the rest of such a run
    monkeypatch.setattr("mpitrain.job.train.trainer.matmul_flops_per_s", lambda device, dtype: 1e9)
    if comm.rank == 0:
        rng = np.random.default_rng(0)
        (folder / "text").write_bytes(b" ".join(rng.choice([b"node", b"rank", b"shard", b"unit"], 4000)))
    comm.barrier()

    def make(run: str, steps: int, *args: str) -> Trainer:
        paths = ["--data.path", str(folder / "text"), "--run", str(folder / run)]
        config = parse([*SETTINGS.split(), *paths, "--train.steps", str(steps), *args])
        return Trainer(config, comm, Lasting(job=run) if config.train.elastic else None)

    return make


def flip(tensor: torch.Tensor, element: int = 0, bit: int = 20) -> None:
    """Flip a bit of an element of a float32 tensor, unseen by torch."""
    tensor.detach().view(-1).numpy().view(np.int32)[element] ^= np.int32(1 << bit) if bit < 31 else np.int32(-(2**31))


def in_step(trainer: Trainer, step: int, act: Callable[[], Any]) -> None:
    """Call `act` on this rank in step number `step` (from 1), between its backward and the optimizer's step."""
    train = trainer.passes.train

    def then_act(*args: Any) -> Any:
        total = train(*args)
        if trainer.step + 1 == step:
            act()
        return total

    trainer.passes.train = then_act  # type: ignore[method-assign]


def fails_at(trainer: Trainer, step: int) -> list[int]:
    """The step after `step` steps raises a ValueError on all ranks. Returns a list that gets the number of steps before each step."""
    train, seen = trainer.passes.train, list[int]()

    def or_fail(*args: Any) -> Any:
        seen.append(trainer.step)
        if trainer.step == step:
            with trainer.comm.together():
                raise ValueError("on purpose")
        return train(*args)

    trainer.passes.train = or_fail  # type: ignore[method-assign]
    return seen
