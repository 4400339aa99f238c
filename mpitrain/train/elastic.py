"""An elastic run: the main job, which goes on in place on the ranks that a loss has left."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from collectives import Communicator
from mpitrain.config import Config
from mpitrain.elastic.survive import Recovered, survive
from mpitrain.train.endurance import Lasting
from mpitrain.train.trainer import Trainer


def train(config: Config, comm: Communicator, building: Callable[[], AbstractContextManager[None]]) -> None:
    """Train to the end of the run. Collective over the world. `building()`: a context in which each Trainer is made."""
    lasting = Lasting()
    lasting.job = comm.broadcast_object(lasting.job)
    lasting.origin = "" if config.resume in ("auto", "never") else config.resume
    parallel = config.parallel

    def attempt(ranks: Communicator, recovered: Recovered | None) -> None:
        lasting.recovered = recovered
        if recovered is not None:
            lasting.unreported.append(recovered)
        has_begun = any(ranks.all_gather_object(lasting.has_begun))
        with building():
            trainer = Trainer(_settings(config, recovered, has_begun=has_begun), ranks, lasting)
        trainer.fit()

    axes = {"pp": parallel.pipeline, "tp": parallel.tensor, "dp_replicate": parallel.copies}
    survive(attempt, comm, axes=axes, min_ranks=config.train.min_ranks)


def _settings(config: Config, recovered: Recovered | None, *, has_begun: bool) -> Config:
    """The settings of an attempt: after a loss another layout. A run that has begun goes on from its own state."""
    if recovered is not None:
        axes = recovered.layout.axes
        parallel = replace(config.parallel, pipeline=axes["pp"], tensor=axes["tp"], copies=axes["dp_replicate"])
        config = replace(config, parallel=parallel)
    return replace(config, resume="auto") if has_begun else config
