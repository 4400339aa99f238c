"""What a run trains, on this rank: the data, the model and the optimizer of the settings."""

from dataclasses import replace
from pathlib import Path

import torch

import ckpt
from ckpt.saving.mpio import mpio_error
from collectives import Communicator
from mpitrain.job.config import Config, ConfigError, check_ranks
from mpitrain.job.data.loading import load_data, speed_up
from mpitrain.job.data.streaming.feed import tell
from mpitrain.job.data.tokenizers import load_tokenizer
from mpitrain.job.record.sinks import check_sinks
from mpitrain.job.train.batches.rank_batches import RankBatches
from mpitrain.job.train.checkpoints.saving import settle_wires
from mpitrain.job.train.endurance import Lasting
from mpitrain.job.train.hardware import Hardware
from mpitrain.job.train.model import make_diloco, make_model, make_optimizer
from mpitrain.job.train.steps.stepper import Stepper
from mpitrain.placement.axes import mesh
from mpitrain.sharding.unit.unit import slices_of


class Workload:
    """The objects of a run that depend on its settings and its ranks alone. All methods are collective.

    Args:
        config: the settings.
        comm: the ranks of the run.
        hardware: of this rank, which computes on its device.
        start: the checkpoint from which the run continues; None without one.
        lasting: of an elastic run; None for another run.

    Raises:
        ConfigError: the settings do not fit the data.
    """

    def __init__(
        self,
        config: Config,
        comm: Communicator,
        hardware: Hardware,
        *,
        start: Path | ckpt.Url | None,
        lasting: Lasting | None,
    ) -> None:
        self.hardware, device = hardware, hardware.device
        known = None if lasting is None else lasting.found
        self.found = (
            load_data(config.data, comm, batch=config.train.batch, context=config.model.resolve().context)
            if known is None
            else known
        )
        with comm.together():
            self.tokenizer = load_tokenizer(config.data, vocab=config.model.resolve().vocab)
        self.about_data = speed_up(self.tokenizer, self.found, config.data, comm, seed=config.train.seed)
        """Lines about the programs that read and tokenize, and about too few data."""
        if lasting is not None:
            lasting.found = self.found
        parallel = config.parallel
        self.mesh = mesh(comm, tp=parallel.tensor, pp=parallel.pipeline, dp_replicate=parallel.copies)
        self.data = self.mesh["dp_replicate", "dp_shard", "cp"]
        """The ranks that share a global batch."""
        self.num_same = comm.size // self.data.size
        """The ranks that have the same rows."""
        with comm.together():
            self.batches = RankBatches(
                config, self.found, self.data, device=device, tokenizer=self.tokenizer, all_ranks=comm,
                same=self.mesh["pp", "tp"], say=tell,
            )  # fmt: skip
            self.about_data += self.batches.lacks
        # A load gives the model its values if there is a checkpoint, and most likely after a loss of ranks.
        self.has_values = start is None and (lasting is None or lasting.recovered is None)
        """Whether the model was made with its initial values."""
        self.parallel = settle_wires(parallel, comm, start)
        """The settings, with the wire formats that are used."""
        self.model, self.passes = make_model(
            replace(config, parallel=self.parallel), self.mesh, device, has_values=self.has_values
        )
        self.slices = slices_of(self.model)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.stepper = Stepper(self.model, self.optimizer, config)
        # Only weights are loaded to evaluate: the outer parameters.
        self.diloco = None if config.train.eval_only else make_diloco(self.model, config.parallel)
        self.seed_of = self.data.rank + self.data.size * self.mesh["pp"].rank
        """Ranks with the same number draw the same random numbers: those of `tp`, but not two stages of a pipeline."""


def check_settings(config: Config, comm: Communicator) -> None:
    """ConfigError on all ranks if these ranks cannot run the settings. Collective."""
    with comm.together():
        check_ranks(config, comm.size)
    with comm.together():
        check_sinks(config.log.sinks)
        # Each rank checks its node before the first collective operation that depends on the result.
        if config.parallel.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("parallel.device: cuda was asked for, but torch sees no GPU here; choose auto or cpu")
        if config.checkpoint.driver != "posix" and (problem := mpio_error(comm.mpi)):
            raise ConfigError(f"checkpoint.driver: {problem}")


def check_evaluation(config: Config, comm: Communicator, *, has_start: bool) -> None:
    """ConfigError on all ranks if the run shall only evaluate, and has no model or no batches for it. Collective.

    `has_start`: whether there is a checkpoint to continue from.
    """
    with comm.together():
        if config.train.eval_only and not has_start and config.resume == "auto":
            raise ConfigError(
                f"train.eval_only: run {config.run} has no checkpoint to evaluate; choose another with --run or "
                "--resume, or evaluate the initial values with --resume never"
            )
        if config.train.eval_only and not config.train.eval_batches:
            raise ConfigError("train.eval_only: train.eval_batches is 0, so there is nothing to do")
