"""The rounds: every contestant a step in each, in an order that is drawn anew, and where the time of its step goes."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from collectives import Communicator
from collectives.bench.timing import turns
from mpitrain.bench.contestant import Contestant, Place
from mpitrain.bench.memory import Peak, PssSampler, state_bytes
from mpitrain.bench.results import Case, Phases, Row
from mpitrain.models import flops_per_token

WARM_UP = 2  # steps that are not timed: the first allocates, the second settles
SAMPLED = 3  # steps during which memory is sampled, before the timed ones
PARTS = 3  # forward, backward, update; then the whole


class Clock:
    """Marks between the parts of a step. On a GPU they are events in its stream: to wait at each mark would end the overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._wait()
        self._start = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        """A part ends here."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each part, and of the whole up to now."""
        self._wait()
        whole = time.perf_counter() - self._start
        if self._on_gpu:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [*(one.elapsed_time(other) / 1e3 for one, other in pairs), whole]
        pairs_s = zip(self._marks, self._marks[1:], strict=False)
        return [*(other - one for one, other in pairs_s), whole]

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


class Timed:
    """The steps of one contestant on this rank: a line of figures each, and the loss."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.lines: list[list[float]] = []  # forward, backward, update, whole; communication in the first two
        self.loss = 0.0

    def step(self, tokens: torch.Tensor, place: Place) -> None:
        """After a barrier, so that nobody waits for what came before."""
        place.comm.barrier()
        clock = Clock(place.device)
        before = self.contestant.communication_s() or 0.0
        loss = self.contestant.forward(tokens)
        after_forward = self.contestant.communication_s() or 0.0
        clock.mark()
        self.contestant.backward(loss)
        after_backward = self.contestant.communication_s() or 0.0
        clock.mark()
        self.contestant.update()
        clock.mark()
        self.contestant.clear()
        self.lines.append([*clock.seconds(), after_forward - before, after_backward - after_forward])
        self.loss = float(loss.detach())


def measure(
    contestants: Sequence[Contestant], case: Case, place: Place, *, steps: int, flops_per_s: float
) -> list[Row]:
    """Time them in turn. Collective: the rows are the same on all ranks. `flops_per_s`: the yardstick, of the mean rank."""
    batches = _Batches(case, place)
    everyone = [Timed(contestant) for contestant in contestants]
    for round_ in range(WARM_UP + steps):
        tokens = next(batches)
        for i in turns(round_, len(everyone)):
            everyone[i].step(tokens, place)
    return [_row(timed, case, place, flops_per_s) for timed in everyone]


def sampled_steps(contestant: Contestant, case: Case, place: Place) -> PssSampler:
    """Some steps in which memory is watched, not time. Collective."""
    batches, timed = _Batches(case, place), Timed(contestant)
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place.device)  # the yardstick's matrices are larger than some models
    with PssSampler() as sampler:
        for _ in range(SAMPLED):
            timed.step(next(batches), place)
    return sampler


class _Batches:
    """Tokens drawn at random, the same in every launch, others on each rank."""

    def __init__(self, case: Case, place: Place) -> None:
        self._generator = torch.Generator().manual_seed(place.comm.rank)
        self._shape, self._vocab, self._device = (case.batch, case.context + 1), case.config().vocab, place.device

    def __next__(self) -> torch.Tensor:
        return torch.randint(0, self._vocab, self._shape, generator=self._generator).to(self._device)


def _row(timed: Timed, case: Case, place: Place, flops_per_s: float) -> Row:
    comm, contestant = place.comm, timed.contestant
    slowest = np.array([line[PARTS] for line in timed.lines[WARM_UP:]])
    comm.all_reduce(slowest, "max")
    means = np.array(timed.lines[WARM_UP:])
    comm.all_reduce(means, "avg")
    totals = np.array([state_bytes(contestant.held())], np.int64)
    comm.all_reduce(totals, "max")
    loss = np.array([timed.loss])
    comm.all_reduce(loss, "avg")
    step_s = median(slowest.tolist())
    tokens = case.batch * case.context
    return Row(
        name=contestant.name,
        step_s=step_s,
        fastest_s=float(slowest.min()),
        slowest_s=float(slowest.max()),
        phases=phases(means, slowest, knows_communication=contestant.communication_s() is not None),
        tokens_per_s=comm.size * tokens / step_s,
        mfu=flops_per_token(case.config()) * tokens / step_s / flops_per_s,
        loss=float(loss[0]),
        state_bytes=int(totals[0]),
    )


def phases(means: np.ndarray, slowest: np.ndarray, *, knows_communication: bool) -> Phases:
    """From lines as `Timed` has them, of the ranks' mean, and the slowest rank's seconds of the same steps."""
    forward, backward, update, _, in_forward, in_backward = means.T
    of_steps = {
        "forward_s": forward - in_forward,
        "backward_s": backward - in_backward,
        "comm_s": in_forward + in_backward,
        "optimizer_s": update,
        "other_s": slowest - forward - backward - update,
    }
    medians: dict[str, float | None] = {name: float(np.median(seconds)) for name, seconds in of_steps.items()}
    if not knows_communication:
        medians["comm_s"] = None
    return Phases(**medians)  # type: ignore[arg-type]


def largest(peak: Peak, comm: Communicator) -> dict[str, Any]:
    """The fields of a `Row` that tell of memory: of the rank that needs most. Collective."""
    peaks = comm.all_gather_object(peak)
    columns = zip(*peaks, strict=True)
    names = ("peak_rss_bytes", "peak_pss_bytes", "added_pss_bytes", "peak_gpu_bytes")
    return {name: None if None in column else max(column) for name, column in zip(names, columns, strict=True)}
