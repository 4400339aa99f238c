"""The time of each contestant's step and of its parts."""

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from collectives.bench.kit.turns import Seconds, Series, mean_rank, slowest, spread, take_turns
from mpitrain.models import flops_per_token
from mpitrain.tools.bench.memory import PssSampler, state_bytes
from mpitrain.tools.bench.model import TrainedModel, TrainingSetup
from mpitrain.tools.bench.results import BenchCase, Phases, StepRow

WARM_UP = 2  # steps that are not timed: the first allocates memory, the second is not steady yet
SAMPLED = 3  # steps during which memory is sampled, before the timed ones


class DeviceStepClock:
    """Marks between the parts of a step. On a GPU they are events in its stream, because a wait at each mark would end the overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self._wait()
        self._start = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        """End a part of the step."""
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The seconds of each part, then the seconds from the start until now."""
        self._wait()
        whole = time.perf_counter() - self._start
        pairs = pairwise(self._marks)
        parts = [a.elapsed_time(b) / 1e3 for a, b in pairs] if self._on_gpu else [b - a for a, b in pairs]
        return [*parts, whole]

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


class TimedSteps:
    """A contestant (see collectives/bench/kit/turns.py): the steps of one model on tokens that are the same in every launch."""

    def __init__(self, model: TrainedModel, case: BenchCase, setup: TrainingSetup) -> None:
        self.model, self.setup = model, setup
        self.loss = 0.0
        self._shape, self._vocab = (case.batch, case.context + 1), case.config().vocab
        ranks = range(setup.comm.size) if model.takes_whole_batch else [setup.comm.rank]
        self._generators = [torch.Generator().manual_seed(rank) for rank in ranks]  # each rank has other tokens

    def turn(self, round_: int) -> Seconds:
        """Take a step after a barrier, so that no rank waits for earlier work. "forward" and "backward" include their communication."""
        of_ranks = [torch.randint(0, self._vocab, self._shape, generator=each) for each in self._generators]
        tokens = torch.cat(of_ranks).to(self.setup.device)
        model = self.model
        self.setup.comm.barrier()
        clock = DeviceStepClock(self.setup.device)
        before = model.communication_s() or 0.0
        loss = model.forward(tokens)
        after_forward = model.communication_s() or 0.0
        clock.mark()
        model.backward(loss)
        after_backward = model.communication_s() or 0.0
        clock.mark()
        model.update()
        clock.mark()
        model.clear()
        forward, backward, update, step = clock.seconds()
        self.loss = float(loss.detach())
        return {
            "forward": forward,
            "forward comm": after_forward - before,
            "backward": backward,
            "backward comm": after_backward - after_forward,
            "update": update,
            "step": step,
        }


def measure(
    models: Mapping[str, TrainedModel], case: BenchCase, setup: TrainingSetup, *, steps: int, flops_per_s: float
) -> list[StepRow]:
    """Time the models in turn; the rows are the same on all ranks. Collective. `flops_per_s`: of a large matrix product, mean rank."""
    contestants = {name: TimedSteps(model, case, setup) for name, model in models.items()}
    series = take_turns(contestants, rounds=steps, warm_up=WARM_UP)
    means, longest = mean_rank(setup.comm, series), slowest(setup.comm, series)
    return [_row(name, timed, case, means, longest[name, "step"], flops_per_s) for name, timed in contestants.items()]


def sampled_steps(model: TrainedModel, case: BenchCase, setup: TrainingSetup) -> PssSampler:
    """Take some steps, and sample the memory meanwhile. Collective."""
    timed = TimedSteps(model, case, setup)
    with PssSampler() as sampler:
        for round_ in range(SAMPLED):
            timed.turn(round_)
    return sampler


def _row(
    name: str, timed: TimedSteps, case: BenchCase, means: Series[str], seconds: np.ndarray, flops_per_s: float
) -> StepRow:
    comm, model = timed.setup.comm, timed.model
    held = np.array([state_bytes(model.held())], np.int64)
    comm.all_reduce(held, "max")
    loss = np.array([timed.loss])
    comm.all_reduce(loss, "avg")
    step_s, fastest_s, slowest_s = spread(seconds)
    tokens = case.batch * case.context
    parts = {part: mean for (of, part), mean in means.items() if of == name}
    return StepRow(
        name=name,
        step_s=step_s,
        fastest_s=fastest_s,
        slowest_s=slowest_s,
        phases=phases(parts, seconds, knows_communication=model.communication_s() is not None),
        tokens_per_s=comm.size * tokens / step_s,
        mfu=flops_per_token(case.config()) * tokens / step_s / flops_per_s,
        loss=float(loss[0]),
        state_bytes=int(held[0]),
        planned_s=model.planned_s(),
    )


def phases(means: Mapping[str, np.ndarray], slowest: np.ndarray, *, knows_communication: bool) -> Phases:
    """The phases. `means`: the parts of each step by the names of `TimedSteps`, mean of the ranks. `slowest`: seconds of each step."""
    comm = means["forward comm"] + means["backward comm"]
    return Phases(
        forward_s=float(np.median(means["forward"] - means["forward comm"])),
        backward_s=float(np.median(means["backward"] - means["backward comm"])),
        comm_s=float(np.median(comm)) if knows_communication else None,
        optimizer_s=float(np.median(means["update"])),
        other_s=float(np.median(slowest - means["forward"] - means["backward"] - means["update"])),
    )
