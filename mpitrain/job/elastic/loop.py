"""`run`: a training loop of a user, which goes on in place after the loss of ranks."""

import hashlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

import collectives
from collectives import Communicator, recovery
from mpitrain.job.elastic.copies.files import newest_epoch
from mpitrain.job.elastic.copies.holding import hold, is_unheld, release, remove_all
from mpitrain.job.elastic.copies.restoring import NodeCopies, find_state
from mpitrain.job.elastic.copies.taking import StateCopies
from mpitrain.job.elastic.layout import Layout
from mpitrain.job.elastic.survive import RankProgress, Recovered, going_on, survive
from mpitrain.weights import state as weights

_ENDING_S = 15.0  # for the processes of a job that is ending


class HasState(Protocol):
    """An object with a state that is the same on all ranks, such as the position in the data."""

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of `state_dict`, perhaps of another number of ranks."""


@dataclass
class State:
    """The state of a training, which `build` makes and `train` changes. `step`: the steps done; `data`: see HasState."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: HasState | None = None
    step: int = 0
    _after_step: "Callable[[State], None]" = field(default=lambda state: None, repr=False)

    def commit(self) -> None:
        """One step is done: it is counted, and each `every` steps the state is copied. All ranks call it after each step."""
        self.step += 1
        self._after_step(self)


def run(
    train: Callable[[State], None],
    build: Callable[[Communicator], State],
    *,
    every: int = 10,
    name: str | None = None,
    axes: Mapping[str, int] | None = None,
    min_ranks: int = 1,
) -> None:
    """Call `train(build(comm))`; after a loss of ranks again on the ranks that are left, with the state of the newest copies.

    Collective over the world. `build(comm)`: makes the model, the optimizer and the data for the ranks of `comm`; returns a State at
    step 0. `train(state)`: trains to the end, from `state.step` on, and calls `state.commit()` after each step. So at most `every`
    steps are done again. The copies are in the shared memory of the nodes; with several nodes each copy is also on the next node.

    `name`: a later job with this name, on the same hosts, goes on from the copies that a killed job has left; None: the copies
    serve this job alone. `axes`: the layout, such as {"tp": 2, "dp_shard": 2}, for `next_layout`: a rank that has no place in the new
    layout waits. `min_ranks`: the smallest number of ranks that goes on.

    Needs Open MPI 5, started by `mpirun --with-ft ulfm`; elsewhere one line says so, no copies are made, and a lost rank ends the job.
    TooFewRanksError and NoProgressError: see `survive`. On all ranks OSError if node memory is too small for the copies, and
    RuntimeError if another job with this name runs on the same hosts.
    """
    if every < 1:
        raise ValueError(f"elastic.run: every is {every}; expected at least 1 step between two copies")
    comm = collectives.world()
    obstacle = recovery.obstacle()
    if obstacle:
        _say(comm, f"a lost rank ends this job, because {obstacle}")
    run_id = comm.broadcast_object(_id_of(name))
    with comm.together():
        _check_alone(run_id, name)
    progress = RankProgress(0, 0)

    def begin(ranks: Communicator) -> tuple[State, NodeCopies | None]:
        """The state, with the values of the newest copies, if there are any."""
        state = build(ranks)
        hold(run_id)
        found = find_state(ranks, run_id)
        if found is not None:
            found.remove_others()
            meta = weights.load(found, state.model, state.optimizer)
            state.step = meta["step"]
            if state.data is not None:
                state.data.load_state_dict(meta["data"])
        return state, found

    def attempt(ranks: Communicator, layout: Layout, recovered: Recovered | None) -> None:
        state, found = begin(ranks)
        if ranks.rank == 0 and (recovered is not None or found is not None):
            print(f"{going_on(ranks.size, recovered)} from step {state.step}", flush=True)
        epoch = 1 + max(ranks.all_gather_object(newest_epoch(run_id)))
        copies = StateCopies(ranks, run_id, epoch)
        if copies.num_unreached:
            _say(
                ranks,
                f"{copies.num_unreached} ranks cannot connect to their partner, so the loss of their host loses their state",
            )

        def after_step(state: State) -> None:
            nonlocal progress
            progress = RankProgress(max(progress.steps, state.step), progress.begun + 1)
            if state.step % every == 0:
                data = None if state.data is None else state.data.state_dict()
                collected = weights.collect(state.model, state.optimizer, meta={"step": state.step, "data": data})
                try:
                    copies.take(state.step, collected.tensors, collected.meta)
                except OSError:  # on all ranks
                    copies.close(remove=True)
                    raise

        nonlocal progress
        progress = progress._replace(begun=progress.begun + 1)
        state._after_step = after_step
        try:
            train(state)
        except BaseException:
            copies.abandon()
            raise
        copies.close(remove=False)  # until all ranks have ended: a rank may be lost now

    try:
        if obstacle:
            train(begin(comm)[0])
        else:
            survive(attempt, comm, axes=axes or {}, min_ranks=min_ranks, progress=lambda: progress)
    finally:
        release(run_id)
    if collectives.world().node.rank == 0:
        remove_all(run_id)


def _say(comm: Communicator, line: str) -> None:
    if comm.rank == 0:
        print(f"elastic.run: {line}", file=sys.stderr, flush=True)


def _check_alone(run_id: str, name: str | None) -> None:
    """RuntimeError if the processes of another job hold the copies on this node. Those of a job that is ending have some time."""
    until = time.monotonic() + _ENDING_S
    while True:
        if is_unheld(run_id):
            return
        if time.monotonic() > until:
            raise RuntimeError(
                f"elastic.run: another job with the name {name!r} runs on {os.uname().nodename}; end it, or choose a name"
            )
        time.sleep(0.1)


def _id_of(name: str | None) -> str:
    """The id of a run in the names of its copies."""
    return uuid.uuid4().hex[:12] if name is None else hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
