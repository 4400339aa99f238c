"""Makes the model of a layout as the trainer does, and times its steps."""

from time import perf_counter

import numpy as np
import torch

from collectives import Communicator
from collectives.bench.kit.turns import Seconds
from mpitrain.job.config import Config
from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.train.batches.micro_batch import MicroBatch
from mpitrain.job.train.model import make_model, make_optimizer
from mpitrain.job.train.steps.stepper import Stepper
from mpitrain.models.sizes import TransformerConfig
from mpitrain.placement.axes import mesh

WARM_UP = 2


class TrainedSteps:
    """A contestant: the trainer's steps in one layout, on random tokens, without reading data."""

    def __init__(self, config: Config, comm: Communicator, device: torch.device) -> None:
        parallel = config.parallel
        axes = mesh(comm, tp=parallel.tensor, pp=parallel.pipeline, dp_replicate=parallel.copies)
        data = axes["dp_replicate", "dp_shard", "cp"]
        self._comm, self._device = comm, device
        self._model, self._passes = make_model(config, axes, device)
        self._optimizer = make_optimizer(self._model, config.optim)
        self._stepper = Stepper(self._model, self._optimizer, config)
        num_micro, count = config.train.micro_batches(data.size), config.train.rows(data.size)
        self._batches = _drawn(config.model.resolve(), num_micro, count, seed=data.rank)
        # As in the trainer: the mean over the targets of the data ranks.
        self.grad_norm = 0.0
        """Of the last step."""
        self._clock = StepClock(lambda: 0.0)  # the passes ask for one
        self._weight = data.size / (config.train.batch * self._model.config.context)

    def turn(self, round_: int) -> Seconds:
        """A step, which all ranks begin together."""
        self._comm.mpi.Barrier()
        begun = perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        losses = self._passes.train(self._batches, lambda loss: self._stepper.scale(loss * self._weight), self._clock)
        self.grad_norm = self._stepper.clip()
        loss = self._comm.all_reduce(np.array([losses.sum()])).item()
        self._stepper.step(loss, self.grad_norm, number=round_ + 1)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {"step": perf_counter() - begun}


def _drawn(model: TransformerConfig, num_micro: int, count: int, *, seed: int) -> list[MicroBatch]:
    """The ranks of one copy of the model have the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(model.vocab, (num_micro, count, model.context + 1), generator=generator)
    return [MicroBatch(each[:, :-1], each[:, 1:]) for each in rows]
