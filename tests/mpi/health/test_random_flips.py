"""Any bit of any parameter, at a random moment: the flip is found and the error names the rank, or no trace of the flip is left."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from extent import extent
from small_trainers import Make, flip

from collectives import Communicator
from mpitrain.job.health import DesyncError, FlippedBitError
from mpitrain.job.train.trainer import Trainer

pytestmark = pytest.mark.rest

EVERY = 4
PHASES = ("before the forward", "after the backward", "after the optimizer's step")


class Flips:
    """Trials on one trainer: each starts over, and takes steps until the check."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self._moment, self._act = trainer, (-1, ""), lambda: None
        trainer._peak_flops_per_s = 1e9
        train, step = trainer.passes.train, trainer.stepper.step

        def passes(*args: Any) -> float:
            self._at(PHASES[0])
            total = train(*args)
            self._at(PHASES[1])
            return total

        def stepped(*args: Any, **kwargs: Any) -> bool:
            taken = step(*args, **kwargs)
            self._at(PHASES[2])
            return taken

        trainer.passes.train = passes  # type: ignore[method-assign]
        trainer.stepper.step = stepped  # type: ignore[method-assign]

    def _at(self, phase: str) -> None:
        if self._moment == (self.trainer.step, phase):
            self._act()

    def run(self, step: int, phase: str, act: Callable[[], None]) -> Exception | None:
        """The error of a run in which `act` is called once on this rank."""
        self.trainer.state.start_over()
        self.trainer.health.begin(0)
        self._moment, self._act = (step, phase), act
        try:
            for _ in range(EVERY):
                self.trainer.train_step()
        except (DesyncError, FlippedBitError, FloatingPointError) as error:
            return error
        return None


def draw(rng: np.random.Generator, tensors: dict[str, torch.Tensor]) -> tuple[str, int, int]:
    """A tensor, an element of it and a bit; the same on all ranks that hold the same tensors."""
    name = sorted(name for name, tensor in tensors.items() if tensor.numel())[rng.integers(len(tensors))]
    return name, int(rng.integers(tensors[name].numel())), int(rng.integers(32))


def bits_of(trainer: Trainer) -> list[bytes]:
    """The bits of this rank's parameters and of their optimizer state."""
    params = list(trainer.model.parameters())
    state = [value for param in params for value in trainer.optimizer.state[param].values()]
    return [tensor.detach().numpy().tobytes() for tensor in (*params, *state)]


@pytest.mark.ranks(2, 3, 4)
def test_in_replicated_parameters_at_any_time(comm: Communicator, make: Make) -> None:
    trainer = make("run", 100, "--parallel.stage", "0", "--train.check-every", str(EVERY))
    params: dict[str, torch.Tensor] = dict(trainer.model.named_parameters())
    trials, rng = Flips(trainer), np.random.default_rng(comm.size)
    assert trials.run(0, "never", lambda: None) is None
    num_found, num_trials = 0, extent(12, 100)
    for _ in range(num_trials):
        (name, element, bit), wrong = draw(rng, params), int(rng.integers(comm.size))
        step = int(rng.integers(EVERY - 1))  # after the last step no check follows
        phase = PHASES[rng.integers(3)]

        def act(name: str = name, element: int = element, bit: int = bit, wrong: int = wrong) -> None:
            if comm.rank == wrong:
                flip(params[name], element, bit)

        error = trials.run(step, phase, act)
        if error is None:
            # A low bit of a small value, such as a bias at the beginning: an update rounds it away.
            bits = comm.all_gather_object(bits_of(trainer))
            assert all(its == bits[0] for its in bits), (name, element, bit, step, phase)
            continue
        assert isinstance(error, DesyncError), (name, element, bit, step, phase, error)
        assert f"rank {wrong} on " in str(error) and f"model/{name}" in str(error), error
        num_found += 1
    assert num_found > num_trials / 2


def test_in_shards_during_a_checked_step(comm: Communicator, make: Make) -> None:
    storage = "resident" if comm.size % 2 else "private"
    trainer = make("run", 100, "--parallel.storage", storage, "--train.check-every", str(EVERY))
    trials, rng = Flips(trainer), np.random.default_rng(comm.size)
    assert trials.run(0, "never", lambda: None) is None
    for _ in range(extent(8, 100)):
        wrong, seed = int(rng.integers(comm.size)), int(rng.integers(10**6))
        # The window begins with the end of the step before, and ends before the next update.
        phase = PHASES[rng.integers(2)]

        def act(wrong: int = wrong, seed: int = seed) -> None:
            if comm.rank == wrong:
                its = {name: param for name, param in trainer.model.named_parameters() if param.numel()}
                tensors: dict[str, torch.Tensor] = {f"model/{name}": param for name, param in its.items()}
                for name, param in its.items():
                    tensors |= {f"{key}/{name}": value for key, value in trainer.optimizer.state[param].items()}
                name, element, bit = draw(np.random.default_rng(seed), tensors)
                flip(tensors[name], element, bit)

        error = trials.run(EVERY - 1, phase, act)
        assert isinstance(error, FlippedBitError), (seed, phase, error)
        assert f"rank {wrong} on " in str(error), error
