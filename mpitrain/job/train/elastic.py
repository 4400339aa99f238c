"""An elastic run: the main job, which goes on in place on the ranks that a loss has left."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from pathlib import Path

import collectives
from collectives import Communicator
from mpitrain.job.config import Config
from mpitrain.job.elastic.copies.holding import remove_all
from mpitrain.job.elastic.layout import Layout
from mpitrain.job.elastic.lease import read_lease
from mpitrain.job.elastic.survive import Recovered, survive
from mpitrain.job.train.endurance import Lasting
from mpitrain.job.train.trainer import Trainer


def train(config: Config, comm: Communicator, building: Callable[[], AbstractContextManager[None]]) -> None:
    """Train to the end of the run. Collective over the world. `building()`: a context in which each Trainer is made."""
    lasting = Lasting()
    lasting.job = comm.broadcast_object(lasting.job)
    lasting.origin = "" if config.resume in ("auto", "never") else config.resume
    parallel = config.parallel

    def attempt(ranks: Communicator, layout: Layout, recovered: Recovered | None) -> None:
        lasting.num_idle, lasting.recovered = layout.num_idle, recovered
        if recovered is not None:
            lasting.unreported.append(recovered)
        has_begun = _agree(ranks, lasting)
        with building():
            trainer = Trainer(_settings(config, layout, has_begun=has_begun), ranks, lasting)
        trainer.fit()

    axes = {"pp": parallel.pipeline, "tp": parallel.tensor, "dp_replicate": parallel.copies}
    has_local_steps = parallel.local_steps > 0
    if has_local_steps:  # a copy with a lost rank is left out
        axes["dp_shard"] = max(comm.size // prod(axes.values()), 1)
    batches = config.train.batch // config.train.accumulate
    survive(
        attempt, comm, axes=axes, batches=batches, whole_copies=has_local_steps, min_ranks=config.train.min_ranks,
        progress=lambda: lasting.progress,
    )  # fmt: skip
    # The run has ended with a checkpoint. A node whose ranks had no work at the end may have copies from before.
    if collectives.world().node.rank == 0 and (lease := read_lease(Path(config.run))) is not None:
        remove_all(lease.run)


def _agree(ranks: Communicator, lasting: Lasting) -> bool:
    """Let the ranks of an attempt agree on what they keep: a rank that had no work before has kept nothing. Returns whether the run has
    begun."""
    kept = ranks.all_gather_object((lasting.has_begun, lasting.first_lease, lasting.found is not None))
    begun, leases, with_data = zip(*kept, strict=True)
    lasting.first_lease = max(leases)
    if not all(with_data):
        lasting.found = None  # all ranks load it together
    return any(begun)


def _settings(config: Config, layout: Layout, *, has_begun: bool) -> Config:
    """The settings of an attempt in this layout. A run that has begun goes on from its own state."""
    axes = layout.axes
    parallel = replace(config.parallel, pipeline=axes["pp"], tensor=axes["tp"], copies=axes["dp_replicate"])
    config = replace(config, parallel=parallel)
    return replace(config, resume="auto") if has_begun else config
