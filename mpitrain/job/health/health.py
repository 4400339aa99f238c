"""What a training loop calls to find silent faults: `Health`.

    health.begin(step)                                        once before the first step, and after each change of the state
    is_odd = health.is_odd(grad_norm)                         each rank by itself; then the ranks tell each other
    skips = health.before_step(...)                           when the loss and the gradient norm are known, before the optimizer's step
    health.after_step(...)                                    after it
    health.go_back(bad)                                       after a step that was not finite, if `may_go_back`
    health.saved(step); state_dict(); load_state_dict(...)    with each checkpoint

All decisions follow from numbers that all ranks have, or that they exchange. A *checked* step is one whose number is a multiple of
`train.check_every`, or of `checkpoint.every`: its state will be saved. Before its optimizer's step the ranks compare what they hold
alike (replicas.py), and each rank compares its shards with what they were after the last optimizer's step (resting.py). The ranks also
compare in a step with a spike, and in one that is not finite: a flipped bit of an exponent shows there first.
"""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from collectives import Communicator
from mpitrain.job.config import Config, to_toml
from mpitrain.job.data.positions import Positions
from mpitrain.job.health import holdings, wording
from mpitrain.job.health.replicas import Replicas
from mpitrain.job.health.reports import Reports
from mpitrain.job.health.resting import Resting
from mpitrain.job.health.rewind import GoodStates, restore
from mpitrain.job.health.spikes import Spike, Window


class DesyncError(RuntimeError):
    """Copies on different ranks that must be equal differ."""


class FlippedBitError(RuntimeError):
    """Bits of a rank's shards changed while no one wrote them."""


class Bad(NamedTuple):
    """Steps that were not finite: `first` to `last`, counted from 0, and why the last one cannot be skipped."""

    first: int
    last: int
    why: str


class Health:
    """The checks of one run on this rank. All methods are collective, with the same arguments on all ranks where not said otherwise.

    `data`: the ranks that share a global batch. `seed_of`: ranks with the same number draw the same random numbers. `numbers`: what
    else all ranks must have alike, as text. `sources`: where good states are; a list that the caller may change.
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        data: Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Positions,
        *,
        device: torch.device,
        seed_of: int,
        numbers: Callable[[], Mapping[str, str]],
        reports: Reports,
    ) -> None:
        self._train, self._comm, self._model, self._optimizer = config.train, comm, model, optimizer
        self._batches, self._device, self._seed_of, self._numbers = batches, device, seed_of, numbers
        self._settings, self._reports = to_toml(config), reports
        self._saves_every = config.checkpoint.every
        self._data = data.broadcast_object(comm.rank)
        self._hosts = comm.all_gather_object(platform.node())
        self._replicas, self._resting = Replicas(comm), Resting()
        threshold = config.train.spike_threshold or math.inf
        self._windows = Window("loss", threshold), Window("gradient norm", threshold, in_logs=True)
        self._versions: dict[str, int] = {}
        self.sources: list[GoodStates] = []
        self.reached: dict[int, float] = {}
        """The steps whose states this job has saved, or begun from, each with the time at which it was there."""
        self._copied: dict[int, float] = {}  # the same for copies in node memory
        self._rewinds = 0
        self._bad_since: int | None = None  # the first of the last steps, all of which were not taken
        self._dead_end: int | None = None  # the state to which the run went back, and from which it has taken no step

    # A step

    def begin(self, step: int) -> None:
        """The next step is number `step` (from 0), from a state that was just made or loaded."""
        self.reached[step] = time.perf_counter()
        self._begin(step)

    def is_odd(self, grad_norm: float) -> bool:
        """Whether this rank's gradient norm is a spike or not finite. Not collective: a fault may have changed it on one rank alone."""
        return not math.isfinite(grad_norm) or self._windows[1].judge(grad_norm) is not None

    def before_step(self, step: int, loss: float, grad_norm: float, *, is_odd: bool, is_last: bool = False) -> bool:
        """Check before the optimizer's step number `step` (from 0). Returns whether the step is to be left out, because of a spike.

        `is_odd`: on some rank. `is_last`: the run saves and ends after this step. DesyncError or FlippedBitError, on all ranks.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        found = [
            window.judge(value) for window, value in zip(self._windows, (loss, grad_norm), strict=True)
        ] * is_finite
        spikes = [spike for spike in found if spike is not None]
        is_odd |= not math.isfinite(loss) or any(spike.what == "loss" for spike in spikes)
        if self._train.check_every and (self._is_checked(step) or is_odd or is_last):
            self._check(step, grad_norm)
        self._resting.forget()
        skips = False
        if spikes:
            begins = [window.refuse() for window in self._windows]
            is_new_level = any(begins)
            skips = self._train.skip_spikes and not is_new_level
            self._tell_spikes(step, spikes, skips, is_new_level)
        elif is_finite:
            for window, value in zip(self._windows, (loss, grad_norm), strict=True):
                window.accept(value)
        return skips

    def after_step(self, step: int, *, taken: bool) -> None:
        """After step number `step` (from 0), whether the optimizer took it or not."""
        if taken:
            self._bad_since = self._dead_end = None
        elif self._bad_since is None:
            self._bad_since = step
        self._begin(step + 1)

    def _begin(self, step: int) -> None:
        if self._is_checked(step):
            self._resting.take(holdings.at_rest(self._model, self._optimizer))

    def _is_checked(self, step: int) -> bool:
        if not self._train.check_every:
            return False
        is_due = any(period and (step + 1) % period == 0 for period in (self._train.check_every, self._saves_every))
        return is_due or step + 1 == self._train.steps

    # Copies and bits

    def _check(self, step: int, grad_norm: float) -> None:
        """Compare the copies on all ranks, and this rank's shards with themselves."""
        held = holdings.at_rest(self._model, self._optimizer)
        known, changes = self._resting.compare(held) if self._resting.is_taken else ({}, [])
        held += [
            *holdings.full_copies(self._model),
            *holdings.constants(self._model, self._versions, data=self._data),
            *holdings.generators(self._seed_of, self._device),
        ]
        numbers = {
            "the step": str(step),
            "the gradient norm": f"{grad_norm:.7g}",  # processors of other kinds may add in another order
            "the position in the data": str((self._batches.next_sample(step), self._batches.left_out)),
            "the settings": self._settings,
            "the algorithm table": str(self._comm.table.to_dict()),
            "the optimizer's settings": holdings.hyperparameters(self._optimizer),
            **self._numbers(),
        }
        difference, news = self._replicas.compare(held, known, numbers, changes)
        changed = {rank: its for rank, its in enumerate(news) if its}
        if changed:
            self._fail(FlippedBitError, "flipped_bit", step, list(changed), wording.flips(changed, self._place))
        if difference is not None:
            self._fail(
                DesyncError, "desync", step, difference.verdict.suspects, wording.desync(difference, self._place)
            )

    def _place(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"

    def _fail(self, kind: type[RuntimeError], event: str, step: int, ranks: Sequence[int], said: str) -> None:
        hosts = [self._hosts[rank] for rank in ranks]
        alone = len(ranks) == 1
        self._reports.tell(
            "", event, rank=ranks[0] if alone else None, host=hosts[0] if alone else None, step=step + 1,
            ranks=list(ranks), hosts=hosts, what=said,
        )  # fmt: skip
        remedy = (
            "No step was taken. The same command goes on from the last checkpoint; leave out a host that is named again"
        )
        with self._comm.together():
            raise kind(f"step {step + 1}: {said}. {remedy}")

    # Spikes

    def _tell_spikes(self, step: int, spikes: Sequence[Spike], skips: bool, is_new_level: bool) -> None:
        then = "the step and its data are left out" if skips else "the step is taken"
        if is_new_level:
            then = "so many in a row are a new level, and no spikes"
        interval = self._batches.next_sample(step), self._batches.next_sample(step + 1)
        self._reports.tell(
            f"step {step + 1}: {wording.spikes(spikes)}; {then}", "spike", step=step + 1, skipped=skips,
            samples=list(interval), what={spike.what: spike._asdict() for spike in spikes},
        )  # fmt: skip

    # Rewinds

    def may_go_back(self, step: int, why: str) -> Bad | None:
        """The bad steps up to number `step` (from 0), if the run may go back once more. Not collective."""
        if self._rewinds >= self._train.max_rewinds or not self.sources:
            return None
        return Bad(step if self._bad_since is None else self._bad_since, step, why)

    @property
    def is_at_dead_end(self) -> bool:
        """Whether the run has taken no step since it went back: the next rewind passes over the state to which it went back."""
        return self._dead_end is not None

    def go_back(self, bad: Bad) -> int | None:
        """Put back the last good state, and leave out the data of the bad steps. Returns the state's number of steps; None without one.

        The last good state is the newest one; but not the one to which the run has gone back before without any step since.
        """
        began = time.perf_counter()
        samples = self._batches.next_sample(bad.first), self._batches.next_sample(bad.last + 1)
        before = self.state_dict()
        self._resting.forget()
        found = restore(self.sources, bad.last + 1 if self._dead_end is None else self._dead_end)
        if found is None:
            return None
        step = found
        self._batches.leave_out([*before.get("left_out", ()), samples])
        self._rewinds = max(self._rewinds, before.get("rewinds", 0)) + 1
        self._bad_since, self._dead_end = None, step
        now = time.perf_counter()
        cost_s = now - (max(self.reached.get(step, 0.0), self._copied.get(step, 0.0)) or began)
        self._copied.clear()
        for later in [each for each in self.reached if each > step]:
            del self.reached[later]
        self.begin(step)
        of, why = f"{self._rewinds} of {self._train.max_rewinds}", bad.why.partition("; ")[0]
        self._reports.tell(
            f"{why}: back to the state after step {step} (rewind {of}, {cost_s:.1f} s lost); "
            f"{wording.left_out(bad.first, bad.last, samples)}",
            "rewind", cost_s=round(cost_s, 3), to_step=step, steps=[bad.first + 1, bad.last + 1], samples=list(samples), why=why,
        )  # fmt: skip
        return step

    # Checkpoints

    def saved(self, step: int) -> None:
        """The state after `step` steps is being saved."""
        self.reached[step] = time.perf_counter()

    def copied(self, step: int) -> None:
        """The state after `step` steps was copied to node memory."""
        self._copied[step] = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on all ranks, for the `meta` of a checkpoint. Empty while the run is as usual."""
        state: dict[str, Any] = {}
        if self._batches.left_out:
            state["left_out"] = [list(interval) for interval in self._batches.left_out]
        if self._rewinds:
            state["rewinds"] = self._rewinds
        if self._train.skip_spikes:  # the steps that are left out depend on the windows
            state["windows"] = [window.state() for window in self._windows]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. What was left out before stays left out."""
        self._batches.leave_out(state.get("left_out", ()))
        self._rewinds = max(self._rewinds, state.get("rewinds", 0))
        for window, its in zip(self._windows, state.get("windows", ((), ())), strict=True):
            window.load(its)
