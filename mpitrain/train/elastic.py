"""An elastic run: the main job, which goes on in place on the ranks that a loss has left."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from collectives import Communicator
from mpitrain.config import Config
from mpitrain.elastic.survive import Recovered, survive
from mpitrain.train.endurance import Lasting
from mpitrain.train.trainer import Trainer


def train(config: Config, comm: Communicator, building: Callable[[], AbstractContextManager[None]]) -> None:
    """Train to the end of the run. Collective over the world. `building()`: a context in which each Trainer is made."""
    lasting = Lasting()
    lasting.job = comm.broadcast_object(lasting.job)
    parallel = config.parallel

    def attempt(ranks: Communicator, recovered: Recovered | None) -> None:
        lasting.recovered = recovered
        with building():
            trainer = Trainer(config if recovered is None else _changed(config, recovered), ranks, lasting)
        trainer.fit()

    axes = {"pp": parallel.pipeline, "tp": parallel.tensor, "dp_replicate": parallel.copies}
    survive(attempt, comm, axes=axes, min_ranks=config.train.min_ranks)


def _changed(config: Config, recovered: Recovered) -> Config:
    """The settings after a loss: another layout, and the run goes on from its own state."""
    axes = recovered.layout.axes
    parallel = replace(config.parallel, pipeline=axes["pp"], tensor=axes["tp"], copies=axes["dp_replicate"])
    is_new = config.resume != "never" and config.resume != "auto" and not (Path(config.run) / "checkpoints").is_dir()
    return replace(config, parallel=parallel, resume=config.resume if is_new else "auto")
