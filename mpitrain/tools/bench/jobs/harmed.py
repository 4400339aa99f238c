"""The main job with a fault of its own: `python -m mpitrain.tools.bench.jobs.harmed`, with the arguments of `python -m mpitrain`.

    MPITRAIN_CHAOS_FAULT    KIND:RANK:STEP:SEED    what the rank RANK does before it takes the step STEP, see FAULTS
    MPITRAIN_CHAOS_HARM     FILE                   into which it writes the time, just before

A signal from outside cannot cause these faults, or not before an exact step.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from collectives.launcher import environment_of_program
from mpitrain.job.train.trainer import Trainer
from mpitrain.tools.bench.jobs.job import FAULT, HARM, OwnHarm


def _sleep(trainer: Trainer, rng: np.random.Generator) -> None:
    time.sleep(3600)


def _stop(trainer: Trainer, rng: np.random.Generator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill(trainer: Trainer, rng: np.random.Generator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hold_the_gil(trainer: Trainer, rng: np.random.Generator) -> None:
    while True:
        ctypes.PyDLL(None).sleep(3600)  # a signal ends a sleep


def _skip(trainer: Trainer, rng: np.random.Generator) -> None:
    """Come to another operation than the other ranks. Its root is another rank: a root need not wait for the others."""
    trainer.comm.broadcast(np.ones(4, np.float32), root=(trainer.comm.rank + 1) % trainer.comm.size)


def _read(trainer: Trainer, rng: np.random.Generator) -> None:
    """Wait for a disk that does not answer."""
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        open(f"{folder}/fifo").close()


def _flip(trainer: Trainer, rng: np.random.Generator) -> None:
    """Flip a bit of this rank's part of a parameter."""
    tensors = [param.detach() for param in trainer.model.parameters() if param.numel()]
    bits = tensors[rng.integers(len(tensors))].view(torch.int32).numpy().reshape(-1)
    bits[rng.integers(bits.size)] ^= np.array(1 << int(rng.integers(32)), np.uint32).view(np.int32)


_SLOWER = 1.4
"""The time of a slow rank, in times of its time before."""
_NEIGHBOUR = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.nice(4)  # Linux's scheduler gives it 0.41 of the time of a process of nice value 0
while os.getppid() == int(sys.argv[2]):
    sum(range(10**5))
"""


def _slow_by_sleep(trainer: Trainer, rng: np.random.Generator) -> None:
    """Sleep in each forward from now on."""
    passes, seconds = cast(Any, trainer.passes), _extra_s(trainer)
    forward = passes._loss

    def slow(batch: Any) -> Any:
        time.sleep(seconds)
        return forward(batch)

    passes._loss = slow


def _slow_by_data(trainer: Trainer, rng: np.random.Generator) -> None:
    """Wait for the data of each next step from now on."""
    prepare, seconds = trainer.batches.prepare, _extra_s(trainer)

    def slow(step: int) -> None:
        time.sleep(seconds)
        prepare(step)

    trainer.batches.prepare = slow  # type: ignore[method-assign]


def _slow_by_neighbour(trainer: Trainer, rng: np.random.Generator) -> None:
    """Another process takes a part of this rank's core from now on."""
    words = ["-P", "-c", _NEIGHBOUR, str(min(os.sched_getaffinity(0))), str(os.getpid())]
    subprocess.Popen([sys.executable, *words], env=environment_of_program(), stdin=subprocess.DEVNULL)


def _extra_s(trainer: Trainer) -> float:
    """What makes a step as the last one so many times longer."""
    return (_SLOWER - 1) * (trainer.monitor.clock.seconds["forward"] + trainer.monitor.clock.seconds["backward"])


FAULTS: dict[str, Callable[[Trainer, np.random.Generator], None]] = {
    "sleep": _sleep,
    "stop": _stop,
    "kill": _kill,
    "gil": _hold_the_gil,
    "skip": _skip,
    "io": _read,
    "flip": _flip,
    "slow-sleep": _slow_by_sleep,
    "slow-data": _slow_by_data,
    "slow-neighbour": _slow_by_neighbour,
}


def _arm(harm: OwnHarm) -> None:
    take = Trainer.train_step

    def train_step(self: Trainer) -> Any:
        done = Path(os.environ[HARM])
        # Once: after a loss another process may have this number, and come to this step again.
        if (self.comm.rank, self.step) == (harm.rank, harm.step - 1) and not done.exists():
            done.write_text(repr(time.time()))
            FAULTS[harm.kind](self, np.random.default_rng(harm.seed))
        return take(self)

    Trainer.train_step = train_step  # type: ignore[method-assign]


if __name__ == "__main__":
    kind, *numbers = os.environ[FAULT].split(":")
    _arm(OwnHarm(kind, *map(int, numbers)))
    # As `python -m mpitrain` does it, which ends without mpi4py's MPI_Finalize: that may wait forever after the loss of a rank.
    runpy.run_module("mpitrain", run_name="__main__", alter_sys=True)
