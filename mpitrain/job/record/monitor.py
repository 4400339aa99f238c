"""What a training loop calls on each rank to be seen: `Monitor`.

    monitor.open(step)                    opens the files and sinks, on rank 0
    monitor.begin(...)                    the ranks tell each other who they are
    monitor.clock                         divides the time of a step: see gauges/phases.py
    monitor.exchange()                    in each step, where all ranks have just met
    monitor.step(...); monitor.evaluated(...); monitor.saved(...); monitor.went_back(...)
    monitor.end(...); monitor.close()

The figures of all ranks go to rank 0 in one message a step. It travels in the next step, just after a message for which all ranks wait
anyway, so no rank waits for it. Nothing here changes the numbers of a run.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from collectives import Communicator, network_bytes
from collectives.texts import without_secrets
from collectives.version import release
from mpitrain.job.config import Config
from mpitrain.job.record.adding import Added, Moment
from mpitrain.job.record.files import ranks as of_ranks
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.record.gauges.phases import CpuClock, StepClock
from mpitrain.job.record.output import RunOutput
from mpitrain.job.record.stragglers import RankTimes, Straggler, Stragglers

_SAMPLE_EVERY_S = 5.0


class HasSample(Protocol):
    """Gauges."""

    def sample(self) -> dict[str, float]:
        """Figures by their names in `record.ranks.GAUGES`, those that are known."""


class Monitor:
    """The monitor of a run on this rank. `begin`, `exchange`, `saved`, `went_back` and `end` are collective.

    Args:
        config: the settings.
        comm: all ranks.
        folder: of the run.
        may_write: whether the folder still belongs to this job. Only rank 0 calls it.
        write_event: appends an event to the run's folder: see `events.write_event`. Only rank 0 calls it.
        say: prints a line on rank 0.
        communication_s: the seconds that this rank has spent in communication so far.
        memory_bytes: the memory that this rank has now.
        gauges: makes those of this rank.
        objects: the model and the optimizer, for callbacks.
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        folder: Path,
        *,
        may_write: Callable[[], bool],
        write_event: Callable[..., object],
        say: Callable[[str], object],
        communication_s: Callable[[], float],
        memory_bytes: Callable[[], int],
        gauges: Callable[[], HasSample],
        objects: tuple[Any, Any],
    ) -> None:
        self._config, self._comm, self._folder, self._say = config, comm, folder, say
        self._may_write = may_write
        self._write_event, self._memory_bytes, self._objects = write_event, memory_bytes, objects
        self._make_gauges: Callable[[], HasSample] | None = gauges  # None: they have failed
        self._gauges: HasSample | None = None
        self._sampled_at = -math.inf
        self._fresh: dict[str, float] = {}  # gauges of rank 0 that its next line has
        self._gauged = np.full(len(of_ranks.GAUGES), math.nan)
        self.clock, self._cpu = StepClock(communication_s), CpuClock()
        self._output: RunOutput | None = None
        self._hosts: list[str] = []
        self._stragglers = Stragglers([])
        self._tokens, self._flops_per_token = 0, 0.0  # of a step; of a token
        self._peaks: tuple[float, float | None] = (math.inf, None)
        self._waiting: tuple[int, np.ndarray] | None = None  # this rank's figures of the last step, until `exchange`
        self._hidden_s, self._network_bytes = 0.0, 0  # communication before this step
        self._step, self._num_steps, self._is_open = 0, 0, False
        self._own_s = 0.0

    # The beginning

    def open(self, step: int) -> int:
        """Open the files and sinks on rank 0, to go on after `step` steps. Returns the number of later steps, which are done again.

        All ranks call it. On rank 0 OSError, and then all other ranks must end, too.
        """
        self._step, self._is_open = step, True
        if self._comm.rank:
            return 0
        self._output = RunOutput(self._config, self._folder, steps_done=step, told=self._sink_failed, say=self._say)
        return self._output.num_cut

    def begin(
        self,
        *,
        source: str,
        device: str,
        threads: int,
        environment: Mapping[str, str],
        layout: Mapping[str, int],
        work: tuple[int, ...],
        parameters: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops_per_s: float,
        vendor_flops_per_s: float | None,
        memory_bytes_of_rank: int,
    ) -> None:
        """The run begins, or goes on after a resume or a recovery.

        source: of the state, in words. environment: of rank 0, see `train.hardware.environment`. work: ranks with equal values have the
        same work. peak_flops_per_s, vendor_flops_per_s: of all ranks together. memory_bytes_of_rank: what a rank can have.
        """
        told = self._comm.all_gather_object((platform.node(), work))
        self._hosts, works = [host for host, _ in told], [list(its) for _, its in told]
        self._stragglers = Stragglers([its for _, its in told])
        self._tokens, self._flops_per_token = tokens_per_step, flops_per_token
        self._peaks = peak_flops_per_s, vendor_flops_per_s
        if self._comm.rank == 0:
            self._write_event(
                "begin", step=self._step, source=source, ranks=self._comm.size, hosts=self._hosts, device=device, threads=threads,
                environment=dict(environment), layout=dict(layout), work=works, parameters=parameters, tokens_per_step=tokens_per_step,
                flops_per_s=peak_flops_per_s, vendor_flops_per_s=vendor_flops_per_s,
                memory_bytes_of_rank=memory_bytes_of_rank, release=str(release()),
            )  # fmt: skip

    @property
    def peak_flops_per_s(self) -> float:
        """Of a large matrix product, of all ranks together: see `begin`."""
        return self._peaks[0]

    # A step

    def begin_step(self) -> None:
        """A step begins."""
        with self._timed():
            self._hidden_s, self._network_bytes = self._comm.hidden_s, network_bytes()
            self._cpu.begin()
        self.clock.begin()

    def exchange(self, *, is_lost: bool = False) -> None:
        """Bring the figures of the last step to rank 0. To be called where all ranks have just met. is_lost: see `may_write`."""
        if self._waiting is None:
            return
        with self._timed():
            step, mine = self._waiting
            self._waiting = None
            is_new = (now := time.perf_counter()) - self._sampled_at >= _SAMPLE_EVERY_S
            if is_new:
                self._sampled_at, self._fresh = now, self._sample()
                self._gauged = np.array([self._fresh.get(name, math.nan) for name in of_ranks.GAUGES])
            mine = np.concatenate([mine, self._gauged])
            everyones = np.empty((self._comm.size, len(mine))) if self._comm.rank == 0 else None
            self._comm.gather(everyones, mine)
            if everyones is not None and self._output is not None and not is_lost:
                figures, gauges = np.split(everyones, [len(of_ranks.FIGURES)], 1)
                self._output.ranks(of_ranks.line(step, figures, gauges, is_new=is_new))
                self._find_stragglers(step, figures)

    def step(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        rows: int,
        loss_scale: float | None,
        padding: float | None,
        skipped: bool,
        more: Mapping[str, float],
    ) -> StepMetrics:
        """A step has ended, after which `step` steps are done. Losses and norms are the same on all ranks; `rows` are this rank's."""
        step_s = self.clock.step_s
        with self._timed():
            (cpu_s, delay_s), now = self._cpu.read(), time.time()
            seconds, comm_s = self.clock.seconds, self.clock.comm_s
            hidden_s, memory_bytes = max(self._comm.hidden_s - self._hidden_s, 0.0), self._memory_bytes()
            measured, vendor = self._peaks
            flops_per_s = self._tokens / step_s * self._flops_per_token
            metrics = StepMetrics(
                step=step, time=round(now, 3), loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=self._tokens / step_s, step_s=step_s,
                data_s=seconds["data"], forward_s=seconds["forward"], backward_s=seconds["backward"],
                optimizer_s=seconds["optimizer"], comm_s=comm_s, comm_hidden_s=hidden_s, memory_bytes=memory_bytes,
                mfu=flops_per_s / measured, mfu_vendor=flops_per_s / vendor if vendor else None, check_s=seconds["check"],
                loss_scale=loss_scale, padding=padding, skipped=skipped, more=more,
            )  # fmt: skip
            figures = (
                step_s, seconds["data"], seconds["forward"], seconds["backward"], seconds["optimizer"], comm_s, hidden_s,
                seconds["check"], cpu_s, delay_s, rows, memory_bytes, network_bytes() - self._network_bytes,
            )  # fmt: skip
            self._waiting, self._step = (step, np.array(figures)), step
            self._num_steps += 1
            fresh, self._fresh = self._fresh, {}
            entry = metrics.to_dict() | fresh if self._output is not None else {}
        self._call("step", entry)  # it may log figures of this step
        with self._timed():
            figures_of_user = Added.take_figures()
            if self._output is not None and self._may_write():
                self._output.step(entry | figures_of_user)
                if skipped:
                    self._write_event(
                        "skip", step=step, loss=_finite(loss), grad_norm=_finite(grad_norm), loss_scale=loss_scale
                    )
        return metrics

    # Moments

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """The figures of an evaluation, which are the same on all ranks."""
        with self._timed():
            if self._output is not None:
                self._output.evaluation({"step": self._step, "time": round(time.time(), 3), **figures})
        self._call("evaluation", figures)

    def saved(self, path: Path, cost_s: float) -> None:
        """A save has ended, or goes on in the background. cost_s: the seconds for which it has held the training up on this rank."""
        self.exchange()
        with self._comm.together():
            if self._output is not None:
                self._output.check()
        if self._output is not None:
            is_background = self._config.checkpoint.background
            self._write_event(
                "save", step=self._step, path=str(path), cost_s=round(cost_s, 3), background=is_background
            )
        self._call("save", {"path": path, "cost_s": cost_s})

    def reached(self, step: int) -> None:
        """The run has the state after `step` steps."""
        self._step = step

    def went_back(self, step: int) -> None:
        """The run goes on after `step` steps again: the figures of later steps are void. OSError if a file cannot be opened."""
        self._waiting, self._step = None, step
        self._stragglers.forget()
        if self._output is not None:
            self._output.close(goes_on=True)
            self.open(step)

    def heard(self, event: Mapping[str, Any]) -> None:
        """An event was written to the run's folder, on rank 0."""
        with self._timed():
            if self._output is not None:
                self._output.event(event)

    def end(self, reason: str) -> None:
        """The run has ended regularly. The event has `monitor_s`, the seconds of a step that the monitor has taken on rank 0."""
        if not self._is_open:  # nothing was left to do
            return
        self.exchange()
        self._call("end", {"reason": reason})
        if self._output is not None:
            each_s = self.seconds / max(self._num_steps, 1)
            self._write_event("end", step=self._step, reason=reason, monitor_s=round(each_s, 6))

    def failed(self, error: BaseException) -> None:
        """An error ends the run on this rank. Not collective. The event in the run's folder comes from the report of the error."""
        if self._output is not None:
            problem = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
            self._output.event({"event": "failure", "step": self._step, "rank": self._comm.rank, "problem": problem})
        for callback in Added.callbacks:
            try:
                callback.failure(self._moment({"error": error}))
            except Exception as another:  # it must not hide the error
                self._say(f"log: {type(callback).__name__}.failure: {type(another).__name__}: {another}")

    def close(self, *, goes_on: bool = False) -> None:
        """Close the files and sinks. goes_on: other ranks or this one go on with the run in this job."""
        self._cpu.close()
        if self._output is not None:
            self._output.close(goes_on=goes_on)
            self._output = None

    # Inside

    @property
    def seconds(self) -> float:
        """The time that the monitor has taken on this rank, by its own clock; without callbacks."""
        return self._own_s + self.clock.own_s

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, before = time.perf_counter(), self._own_s
        yield
        self._own_s = before + time.perf_counter() - began  # blocks within this one count once

    def _call(self, moment: str, figures: Mapping[str, Any]) -> None:
        for callback in Added.callbacks:
            getattr(callback, moment)(self._moment(figures))

    def _moment(self, figures: Mapping[str, Any]) -> Moment:
        return Moment(self._step, figures, *self._objects, self._comm, self._config)

    def _sample(self) -> dict[str, float]:
        """The gauges of this rank. A package or driver that fails must not end the run: it is told once, and asked no more."""
        if self._make_gauges is None:
            return {}
        try:
            if self._gauges is None:
                self._gauges = self._make_gauges()
            return self._gauges.sample()
        except Exception as error:
            self._make_gauges = self._gauges = None
            self._say(f"gauges: none on rank {self._comm.rank}: {type(error).__name__}: {error}")
            return {}

    def _find_stragglers(self, step: int, figures: np.ndarray) -> None:
        columns = dict(zip(of_ranks.FIGURES, figures.T, strict=True))
        busy_s = of_ranks.busy_s(columns["step_s"], columns["comm_s"], columns["check_s"])
        spent = RankTimes(busy_s, columns["data_s"], columns["cpu_s"], columns["delay_s"], columns["rows"])
        for found in self._stragglers.step(spent):
            self._tell_straggler(step, found)

    def _tell_straggler(self, step: int, found: Straggler) -> None:
        rank, host = found.rank, self._hosts[found.rank]
        self._say(
            f"step {step}: rank {rank} on {host} takes {found.factor:.2f} times as long as the other ranks, for {found.steps} steps in "
            f"a row: {found.words}"
        )
        self._write_event(
            "straggler", rank=rank, host=host, cost_s=round(found.seconds, 3), step=step, factor=round(found.factor, 3),
            cause=found.cause, words=found.words,
        )  # fmt: skip

    def _sink_failed(self, name: str, problem: str) -> None:
        problem = without_secrets(problem)
        self._say(f"log.sinks: {name} has failed, and the run goes on without it: {problem}")
        self._write_event("sink", sink=name, problem=problem)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
