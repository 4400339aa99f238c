"""What sees the steps of a run, and changes none of its numbers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from typing import Any

import torch

from collectives import Communicator, Mesh
from mpitrain import sharding
from mpitrain.job.config import Config
from mpitrain.job.record.console import Terminal
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.record.gauges.gauges import Gauges
from mpitrain.job.record.gauges.peak import vendor_flops_per_s
from mpitrain.job.record.layers.figures import LayerFigures
from mpitrain.job.record.monitor import Monitor
from mpitrain.job.record.trace.tracer import Traced, Tracer
from mpitrain.job.train.batches.losses import SourceLosses
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.hardware import Hardware, memory_bytes, memory_of_rank
from mpitrain.job.train.passes import Passes
from mpitrain.job.train.run import TrainingRun
from mpitrain.models import LanguageModel, flops_per_token, num_parameters
from mpitrain.sharding.unit.unit import slices_of


class Observers:
    """The monitor, traces, figures of layers, losses by source of data, and what rank 0 prints. All methods are collective.

    Args:
        config, comm, run, model, optimizer, passes, hardware: of the trainer.
        sources: the names of the sources of the training data.
        communication_s: the seconds that this rank has spent in communication so far.
        total: sums numbers over all ranks.
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        run: TrainingRun,
        *,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        passes: Passes,
        hardware: Hardware,
        sources: Sequence[str],
        communication_s: Callable[[], float],
        total: Callable[..., list[float]],
    ) -> None:
        self._config, self._run, self._model, self._hardware, self._total = config, run, model, hardware, total
        self._comm = comm
        self.monitor = Monitor(
            config, comm, run.folder, may_write=lambda: not run.is_lost(), write_event=self._write_event, say=self.say,
            communication_s=communication_s, memory_bytes=lambda: memory_bytes(hardware.device),
            gauges=partial(Gauges, model, optimizer, hardware.device), objects=(model, optimizer),
        )  # fmt: skip
        self.tracer = Tracer(
            run.folder,
            comm,
            model=model,
            clock=self.monitor.clock,
            passes=passes,
            traced=config.log.traced,
            say=self.say,
        )
        self._layers = LayerFigures(model, every=config.log.layers_every, total=total)
        self._has_layers = False  # figures of layers are due in this step
        self._losses = SourceLosses(model, sources, slices_of(model))
        self._of_sources: list[float] = []
        self.terminal: Terminal | None = None  # on rank 0, while it trains
        self.is_ending = False
        """The last save prints no line, because the trainer prints it when nothing can interrupt the run."""

    def begin(self, mesh: Mesh, *, source: str, peak_flops_per_s: float) -> None:
        """Training begins, in a folder that is prepared. peak_flops_per_s: of a large matrix product, of all ranks together."""
        sizes, device, hardware = self._model.config, self._hardware.device, self._hardware
        own = vendor_flops_per_s(
            device,
            getattr(torch, self._config.parallel.param_dtype),
            cores=hardware.cores,
            threads=hardware.threads,
        )
        (vendor,) = self._total(math.nan if own is None else own)
        self.monitor.begin(
            source=source,
            **hardware.described(),
            layout={name: mesh[name].size for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")},
            work=(mesh["pp"].rank, sum(prod(each.box.full_shape) for each in sharding.sharded_params(self._model))),
            parameters=num_parameters(sizes),
            tokens_per_step=self._config.train.batch * sizes.context,
            flops_per_token=flops_per_token(sizes),
            peak_flops_per_s=peak_flops_per_s,
            vendor_flops_per_s=None if math.isnan(vendor) else vendor,
            memory_bytes_of_rank=memory_of_rank(device, self._comm),
        )

    def listen(self) -> None:
        """Take the lines and events of the run, until `close`. The run lives longer, and must not keep the model."""
        self._run.heard, self._run.say = self._heard, self.say

    # A step, in this order

    def before_step(self, step: int) -> None:
        """Step number `step` (from 1) is next. What this does is no part of the step."""
        self.tracer.before_step(step)

    def begin_step(self, step: int) -> None:
        """The step begins."""
        self.monitor.begin_step()
        self._has_layers = self._layers.begin(step)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """In the block the model makes its forwards and backwards."""
        with self._losses.observing():
            yield

    def after_backward(self, loss_scale: float | None) -> None:
        """The gradients are reduced, and not yet clipped or divided by `loss_scale`."""
        if self._has_layers:
            self._layers.after_backward(loss_scale)
            self.monitor.clock.skip()

    def values(self, batches: Sequence[MicroBatch]) -> list[float]:
        """This rank's numbers for a message that sums them over all ranks."""
        return [self.tracer.wanted(), *self._losses.sums(batches)]

    def met(self, totals: Sequence[float], *, is_lost: bool) -> None:
        """All ranks have the sums of `values`. is_lost: the folder is another job's now."""
        clock = self.monitor.clock
        clock.skip()
        wanted, *self._of_sources = totals
        self.tracer.agree(wanted)
        self.monitor.exchange(is_lost=is_lost)
        clock.skip()

    def end_step(self, step: int, **known: Any) -> StepMetrics:
        """The step has ended. `known`: the arguments of `Monitor.step`, without `more`."""
        more = self._losses.figures(self._of_sources) | (self._layers.end() if self._has_layers else {})
        return self.monitor.step(step, more=more, **known)

    def after_step(self, step: int, metrics: StepMetrics) -> None:
        """As `before_step`."""
        self._tell(self.tracer.after_step(step))
        if self.terminal is not None:
            self.terminal.step(metrics)

    def went_back(self, step: int) -> None:
        """The run goes on after `step` steps again."""
        self.tracer.went_back()
        self.monitor.went_back(step)

    # The end

    def end(self) -> None:
        """The last step is done."""
        self._tell(self.tracer.finish())

    def end_bar(self) -> None:
        """The lines that follow are below the bar of steps."""
        if self.terminal is not None:
            self.terminal.close()

    def close(self, *, goes_on: bool) -> None:
        """End everything, on this rank alone. goes_on: after a loss of ranks the run goes on in this job."""
        self.tracer.close()
        self.end_bar()
        self.monitor.close(goes_on=goes_on)
        self._run.heard, self._run.say = lambda event: None, lambda line: None

    # Lines and events, on rank 0

    def say(self, text: str) -> None:
        """Print a line."""
        if self.terminal is not None:
            self.terminal.say(text)

    def _heard(self, event: Mapping[str, Any]) -> None:
        if self.terminal is not None and not (event["event"] == "save" and self.is_ending):
            self.terminal.event(event)
        self.monitor.heard(event)

    def _write_event(self, event: str, **fields: Any) -> None:
        """Append an event. A full disk must not end the run here: metrics and checkpoints report it."""
        with suppress(OSError):
            self._run.write_event(event, **fields)

    def _tell(self, traced: Traced | None) -> None:
        if traced is not None:
            path = str(traced.path.relative_to(self._run.folder))
            self._write_event("trace", step=traced.last, first=traced.first, last=traced.last, path=path)
