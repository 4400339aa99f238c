"""One step of the training on this rank, from its micro-batches to the step of the optimizer."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from collectives import Communicator
from mpitrain.job.config import Config
from mpitrain.job.health import Bad, Health
from mpitrain.job.record.files.metrics import StepMetrics
from mpitrain.job.train import stop
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.batches.totals import LossTotal
from mpitrain.job.train.observers import Observers
from mpitrain.job.train.shared_folder import SharedFolder
from mpitrain.job.train.steps.lr import learning_rate
from mpitrain.job.train.workload import Workload


class GoBackError(Exception):
    """A step was not finite, and the run may go back. All ranks raise it."""

    def __init__(self, bad: Bad) -> None:
        super().__init__(bad.why)
        self.bad = bad


class _Targets(NamedTuple):
    """The targets of a global batch."""

    num_counted: float
    """Those that count, once for each rank that has them."""
    num_padding: float
    """Padding, in the same way."""
    weight: float
    """The factor of a loss that is a sum over targets, so that the gradient is that of a mean."""


class TrainStep:
    """Takes the steps of a run.

    Args:
        config, comm: of the run.
        work: what it trains.
        health: its checks.
        observers: what sees the steps.
        folder: of the run.
        loss_total: sums losses over the ranks.
        total: sums numbers over all ranks.
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        work: Workload,
        *,
        health: Health,
        observers: Observers,
        folder: SharedFolder,
        loss_total: LossTotal,
        total: Callable[..., list[float]],
    ) -> None:
        self._config, self._comm, self._work, self._health = config, comm, work, health
        self._observers, self._folder, self._loss_total, self._total = observers, folder, loss_total, total

    def take(self, done: int, batches: Sequence[MicroBatch]) -> tuple[StepMetrics, bool]:
        """The step after `done` steps; returns its metrics and whether any rank was asked to stop. Collective.

        GoBackError on all ranks if the loss or the gradient is not finite, and the run may go back. FloatingPointError if it may not.
        """
        config, work, health, observers = self._config, self._work, self._health, self._observers
        clock, stepper, diloco = observers.monitor.clock, work.stepper, work.diloco
        targets = self._count(batches)
        lr = learning_rate(config, done)
        for group in work.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        work.optimizer.zero_grad(set_to_none=True)
        clock.lap("optimizer")
        with observers.passing():
            losses = work.passes.train(batches, lambda loss: stepper.scale(loss * targets.weight), clock)
        work.batches.prepare(done + 1)  # a GPU computes meanwhile
        clock.lap("data")
        observers.after_backward(stepper.loss_scale)
        grad_norm, loss_scale = stepper.clip(), stepper.loss_scale
        clock.lap("optimizer")
        # One message sums the losses of the global batch, the requests to stop, whether rank 0 lost the folder, odd norms, and the
        # squares of norms.
        is_odd = health.is_odd(grad_norm)
        asked, lost, odd, squares, num_damaged, *sums = self._total(
            stop.requested() or self._folder.is_asked_to_stop(),
            self._folder.is_lost(),
            is_odd,
            grad_norm * grad_norm,
            work.batches.num_damaged(),
            *self._loss_total.values(batches, losses),
            *observers.values(batches),
        )
        of_losses, observed = sums[: self._loss_total.num_values], sums[self._loss_total.num_values :]
        if diloco is not None and diloco.is_local:
            # Each copy has its own norm, and all ranks decide by the same one.
            grad_norm = math.sqrt(squares / self._comm.size)
        observers.met(observed, is_lost=lost > 0)
        num_counted = targets.num_counted
        mean = self._loss_total.total(of_losses) / num_counted if num_counted else math.nan
        if lost:
            self._folder.check_lock()
        work.batches.check_damaged(int(num_damaged))
        skips = health.before_step(done, mean, grad_norm, is_odd=odd > 0, is_last=asked > 0)
        clock.lap("check")
        try:
            taken = stepper.step(mean, grad_norm, number=done + 1, is_empty=not num_counted, skip=skips)
        except FloatingPointError as error:
            if (bad := health.may_go_back(done, str(error))) is not None:
                raise GoBackError(bad) from error
            with self._comm.together():  # every rank has the same numbers
                raise error from None
        if diloco is not None:
            diloco.step()  # also after a skipped step, so that its number alone decides
            if done + 1 == config.train.steps:
                diloco.outer_step()
        clock.lap("optimizer")
        health.after_step(done, taken=taken)
        clock.lap("check")
        tokens = config.train.batch * work.model.config.context
        metrics = observers.end_step(
            done + 1, loss=mean, lr=lr, grad_norm=grad_norm, loss_scale=loss_scale, skipped=not taken,
            rows=sum(len(batch.tokens) for batch in batches),
            padding=targets.num_padding / (tokens * work.num_same) if work.batches.is_padded else None,
        )  # fmt: skip
        return metrics, asked > 0

    def _count(self, batches: Sequence[MicroBatch]) -> _Targets:
        """The targets of the global batch of which this rank has these micro-batches."""
        work, num_ranks = self._work, self._comm.size
        # The ranks of `tp` and `pp` have the same targets: the sums of targets and of losses both count each target once for each.
        # Those of each copy: in local steps a gradient is the mean over one copy's ranks.
        num_copies, copy = (1, 0) if work.diloco is None else (work.diloco.num_copies, work.diloco.copy)
        counted = [sum(batch.num_counted for batch in batches) * (number == copy) for number in range(num_copies)]
        num_padding, *counted_by_copy = self._total(sum(batch.num_padding for batch in batches), *counted)
        num_counted = sum(counted_by_copy)
        # The weight of a loss: the gradient is the mean over the ranks that train as one.
        if work.diloco is not None and work.diloco.is_local:
            weight = num_ranks / num_copies / max(counted_by_copy[copy], 1)
        elif work.slices is not None:  # a gradient is the mean over the slices
            weight = work.slices.count / max(num_counted / work.num_same, 1)
        else:
            weight = num_ranks / max(num_counted, 1)
        return _Targets(num_counted, num_padding, weight)
