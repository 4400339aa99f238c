"""A short run of the trainer whose steps are measured by place. Its numbers are those of the same steps without the measurement."""

import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from threading import get_ident
from typing import Any, NamedTuple

from collectives import Communicator
from collectives.diagnosis.record import newest_operations
from mpitrain.job.config import CheckpointConfig, Config, LogConfig
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.record.gauges.phases import CpuClock
from mpitrain.job.record.layer_ranges import layer_ranges
from mpitrain.job.record.machine.memory import own_bytes
from mpitrain.job.train.hardware import memory_of_rank
from mpitrain.job.train.passes import StagedPasses
from mpitrain.job.train.trainer import Trainer
from mpitrain.optim.norms import NormTime
from mpitrain.placement.rank0 import on_rank0
from mpitrain.stages.schedules import Action
from mpitrain.tools.profile.clock import Communicated, PlaceClock, instants
from mpitrain.tools.profile.memory import Snapshot
from mpitrain.tools.profile.memory_kinds import HeldMemory
from mpitrain.tools.profile.places import PASSES, Place, PlaceTimes
from mpitrain.tools.profile.stage_waits import StageWaits


class RankSteps(NamedTuple):
    """What one rank has measured."""

    stage: int
    """Its number in the pipeline."""
    times: Sequence[PlaceTimes]
    losses: Sequence[float]
    hidden: Sequence[float]
    """Seconds of communication while this rank computed, of each step."""
    cpu: Sequence[tuple[float, float]]
    """CPU time of the thread that trains, and the time that it was ready and had no core, in each step."""
    held: HeldMemory
    """Its memory at the peak of one more step."""
    own_flops_per_s: float
    """Of a large matrix product, the mean of the ranks."""


class MeasuredRun(NamedTuple):
    """The same on all ranks."""

    ranks: Sequence[RankSteps]
    pipelines: Sequence[StageWaits]
    """Of each pipeline; none without stages."""
    is_cpu: bool
    memory: float
    """Bytes that a rank can have."""


def measured_run(config: Config, comm: Communicator, *, warm_up: int, steps: int) -> MeasuredRun:
    """Train `warm_up` + `steps` + 1 steps in a temporary folder without a checkpoint. Collective. Errors as of the trainer."""
    folder = on_rank0(comm, lambda: tempfile.mkdtemp(prefix="mpitrain-profile-"))
    try:
        process_bytes = own_bytes()
        trainer = _ProfiledTrainer(_quiet(config, folder, warm_up + steps + 1), comm)
        trainer.profiler = _Profiler(trainer, warm_up=warm_up, steps=steps, process_bytes=process_bytes)
        with redirect_stdout(io.StringIO()):
            trainer.fit()
        return trainer.profiler.result()
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _quiet(config: Config, folder: str, steps: int) -> Config:
    """The settings without what is not part of a step: evaluations, checkpoints, samples, records, and copies for recoveries."""
    train = replace(
        config.train, elastic=False, eval_batches=0, eval_only=False, sample_bytes=0, steps=max(config.train.steps, steps + 1)
    )  # fmt: skip
    return replace(
        config, run=folder, resume="never", train=train, checkpoint=CheckpointConfig(every=0),
        log=LogConfig(every=steps + 1),
    )  # fmt: skip


class _ProfiledTrainer(Trainer):
    """Has one attribute of its own, so that no name meets one of the trainer's."""

    profiler: "_Profiler"

    def fit(self) -> None:
        with layer_ranges(self.model, self.profiler.enter, self.profiler.leave):
            super().fit()

    def train_step(self) -> tuple[StepMetrics, bool]:
        return self.profiler.step(self.step, super().train_step)

    def communicated(self) -> Communicated:
        """So far, but for what the profiler counts itself."""
        of_stages = self.passes.communication_s()
        return Communicated(self._communication.seconds() - NormTime.seconds - of_stages, of_stages)

    def save(self) -> None:
        """Nothing: the run is for its times."""

    def _report_passes(self) -> None:
        """Nothing: as `save`."""


class _Profiler:
    """What one rank measures of a trainer's steps."""

    def __init__(self, trainer: _ProfiledTrainer, *, warm_up: int, steps: int, process_bytes: int) -> None:
        device = trainer.hardware.device
        self._trainer, self._warm_up, self._last = trainer, warm_up, warm_up + steps
        self._recorded_s = 0.0  # of communication that does not count itself
        self._clock, self._cpu_clock = PlaceClock(instants(device), self._communicated), CpuClock()
        self._snapshot = Snapshot(trainer.model, trainer.optimizer, device, process_bytes=process_bytes)
        self._times: list[PlaceTimes] = []
        self._losses: list[float] = []
        self._hidden: list[float] = []
        self._cpu: list[tuple[float, float]] = []
        self._stage_waits: StageWaits | None = None
        for owner, name, place in (
            (trainer.batches, "of_step", ("data", "")),
            (trainer.batches, "prepare", ("data", "")),
            (trainer.passes, "train", PASSES),
            (trainer.stepper, "clip", ("optimizer", "")),
            (trainer.stepper, "step", ("optimizer", "")),
            (trainer.health, "before_step", ("checks", "")),
            (trainer.health, "after_step", ("checks", "")),
            (trainer.monitor, "exchange", ("monitor", "")),
            (trainer.monitor, "step", ("monitor", "")),
        ):
            setattr(owner, name, self._placed(getattr(owner, name), place))
        if isinstance(trainer.passes, StagedPasses):
            trainer.passes.pipe.around = self._around

    def step(self, done: int, train_step: Callable[[], tuple[StepMetrics, bool]]) -> tuple[StepMetrics, bool]:
        """One step, after `done` steps, measured after the warm-up. The one after the measured steps is that of the snapshot, and the
        last: it takes longer."""
        passes = self._trainer.passes
        if done == self._last:
            if isinstance(passes, StagedPasses):
                self._stage_waits = StageWaits.of(passes.pipe.measured())
            self._clock.begin()
            with self._snapshot.taken():
                return train_step()[0], True
        self._clock.begin()
        self._cpu_clock.begin()
        metrics, asked = train_step()
        if done >= self._warm_up:
            self._times.append(self._clock.end())
            self._cpu.append(self._cpu_clock.read())
            self._losses.append(metrics.loss)
            self._hidden.append(metrics.comm_hidden_s)
        return metrics, asked

    def result(self) -> MeasuredRun:
        """What all ranks have measured. Collective. RuntimeError on all ranks if a signal has stopped the run before the first step."""
        comm, device, stage = self._trainer.comm, self._trainer.hardware.device, self._trainer.mesh["pp"].rank
        self._cpu_clock.close()
        with comm.together():
            if not self._times:
                raise RuntimeError("profile: the run was asked to stop before its first measured step")
        own = RankSteps(
            stage,
            self._times,
            self._losses,
            self._hidden,
            self._cpu,
            self._snapshot.held,
            self._trainer.monitor.peak_flops_per_s / comm.size,
        )
        of_ranks = comm.all_gather_object((own, self._stage_waits if stage == 0 else None))
        return MeasuredRun(
            [each for each, _ in of_ranks],
            [of for _, of in of_ranks if of is not None],
            device.type == "cpu",
            memory_of_rank(device, comm),
        )

    # Places

    def enter(self, layer: str, kind: str) -> None:
        """A layer's forward or backward begins."""
        self._clock.enter(layer, kind)
        self._snapshot.enter(layer, kind)

    def leave(self, layer: str, kind: str) -> None:
        """It ends."""
        self._clock.leave(layer, kind)
        self._snapshot.leave()

    def _placed(self, call: Callable[..., Any], place: Place) -> Callable[..., Any]:
        """`call` with its time in a place. The communication of the passes counts itself; that of other places is in the record."""

        def placed(*args: Any, **kwargs: Any) -> Any:
            self._clock.enter(*place)
            if place == PASSES:
                result = call(*args, **kwargs)
            else:
                before = _newest()
                result = call(*args, **kwargs)
                self._recorded_s += _seconds_since(before)
            self._clock.leave(*place)
            if place == PASSES:
                self._snapshot.passed()
            return result

        return placed

    @contextmanager
    def _around(self, action: Action) -> Iterator[None]:
        """The gradients of weights that a backward has left for later are of no layer."""
        if action.kind != "W":
            yield
            return
        self._clock.enter("weights", "backward")
        yield
        self._clock.leave("weights", "backward")

    def _communicated(self) -> Communicated:
        of = self._trainer.communicated()
        return of._replace(of_layers=of.of_layers + self._recorded_s)


def _newest() -> int:
    """The number of the operation that was entered last; -1 if there is none."""
    return max((each.number for each in newest_operations(1)), default=-1)


def _seconds_since(number: int) -> float:
    """In operations that this thread has entered after that number."""
    new = newest_operations(max(_newest() - number, 0))
    mine = (each for each in new if each.number > number and each.thread == get_ident())
    return sum(max(each.ended - each.begun, 0.0) for each in mine)
