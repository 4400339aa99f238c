"""The part of the main job that lets it survive the loss of ranks: copies of the state, the lease of the folder, and events."""

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from collectives import Communicator
from collectives.texts import show_bytes
from mpitrain.job.config import Config
from mpitrain.job.data.loading import Corpus, DocumentSources
from mpitrain.job.data.tokens import TokenFiles
from mpitrain.job.elastic.copies.holding import hold, remove_all
from mpitrain.job.elastic.copies.restoring import NodeCopies, find_state
from mpitrain.job.elastic.copies.taking import StateCopies
from mpitrain.job.elastic.lease import Lease, first_number, read_lease
from mpitrain.job.elastic.survive import RankProgress, Recovered, going_on
from mpitrain.job.record.files import marks
from mpitrain.job.train.checkpoints.meta import Age
from mpitrain.job.train.run import TrainingRun
from mpitrain.placement.rank0 import on_rank0
from mpitrain.weights.state import Collected


@dataclass
class Lasting:
    """What a rank keeps when the job goes on without other ranks."""

    job: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id of the job, the same on all ranks."""
    origin: str = ""
    """The checkpoint of another run from which this job has started, until it has a state of its own; "" without one."""
    first_lease: int = 0
    """The number of the lease with which this job has started, or the first job of the same supervisor; 0 before."""
    found: Corpus | DocumentSources | TokenFiles | None = None
    flops_per_s: float = 0.0
    num_idle: int = 0
    """Ranks that have no place in the layout."""
    recovered: Recovered | None = None
    """The last recovery, until the first step after it; None before the first loss."""
    unreported: list[Recovered] = field(default_factory=list)
    """The recoveries that events.jsonl lacks: after a loss during a recovery there are several."""
    progress: RankProgress = field(default_factory=lambda: RankProgress(0, 0))
    """Of this rank."""
    has_begun: bool = False
    """Whether this job has prepared the run's folder, as far as this rank knows."""


class Endurance:
    """The endurance of one attempt, on the ranks `comm`. `say`: prints a line on rank 0.

    All methods but `before_step` and `abandon` are collective.
    """

    def __init__(
        self, config: Config, comm: Communicator, run: TrainingRun, lasting: Lasting, say: Callable[[str], object]
    ) -> None:
        self._config, self._comm, self._run, self._lasting, self._say = config, comm, run, lasting, say
        self._lease: Lease | None = None
        self._copies: StateCopies | None = None
        self._restored_from = ""
        self._begun = 0.0
        self._first_epoch = 0  # of the copies from which this attempt has begun, else of its own

    def find(self, age: Age) -> NodeCopies | None:
        """The copies of the state from which the run continues; None if there are none, or the first checkpoint is newer.

        `age`: of that checkpoint. The run must hold its folder's lock.
        """
        self._raise_lease()
        assert self._lease is not None
        hold(self._lease.run)
        lasting = self._lasting
        lasting.first_lease = lasting.first_lease or first_number(self._lease, os.environ.get(marks.LEASE_VARIABLE))
        asks_for_another = lasting.origin or self._config.resume != "auto"
        since = lasting.first_lease if asks_for_another else 0
        found = _newer_copies(self._comm, self._lease.run, age, since)
        self._first_epoch = self._lease.number
        if found is not None:
            found.remove_others()
            self._first_epoch = found.epoch
        return found

    def begin(self, source: str, step: int) -> None:
        """Begin to train after `step` steps, in a folder that `TrainingRun.prepare` has prepared. `source`: of the state."""
        self._restored_from, self._begun = source, time.monotonic()
        earlier = self._comm.broadcast_object(self._run.earlier)
        if earlier is not None:  # --resume never has moved the earlier run aside
            _remove(self._comm, earlier.run)
            self._raise_lease()
            self._lasting.first_lease = 1  # all states of the new run are this job's
        assert self._lease is not None
        hold(self._lease.run)
        self._lasting.has_begun = True
        if self._config.train.copy_every:
            self._copies = StateCopies(self._comm, self._lease.run, self._lease.number)
            if num := self._copies.num_unreached:
                self._say(
                    f"copies: {num} of {self._comm.size} ranks cannot connect to their partner on another host, perhaps because of a "
                    "firewall: after the loss of their host the run goes on from the last checkpoint"
                )
        self._report_losses()
        if self._lasting.recovered is not None:
            self._say(f"{going_on(self._comm.size, self._lasting.recovered)} from step {step} ({self._restored_from})")

    def _report_losses(self) -> None:
        unreported, self._lasting.unreported = self._lasting.unreported, []
        for recovered in unreported if self._comm.rank == 0 else ():
            problem = "; ".join(recovered.causes) or None
            for lost in recovered.lost:
                self._write("failure", rank=lost.rank, host=lost.host, pid=lost.pid, problem=problem)
            layout = recovered.layout
            axes = {name: size for name, size in layout.axes.items() if size > 1}
            cost_s = round(recovered.seconds, 3)
            self._write("shrink", cost_s=cost_s, ranks=layout.num_used, idle=layout.num_idle, layout=axes)

    def before_step(self) -> None:
        """A step begins."""
        done = self._lasting.progress
        self._lasting.progress = done._replace(begun=done.begun + 1)

    def find_good(self, below: int) -> NodeCopies | None:
        """The newest copies of this attempt, or those from which it has begun, with fewer than `below` steps."""
        if self._copies is None or self._lease is None:
            return None
        return find_state(self._comm, self._lease.run, from_epoch=self._first_epoch, below=below)

    def after_step(self, step: int, collect: Callable[[], Collected]) -> bool:
        """Copy the state, if it is time, and report the end of a recovery after its first step. Returns whether there is a copy."""
        done = self._lasting.progress
        self._lasting.progress = done._replace(steps=max(done.steps, step))
        if (recovered := self._lasting.recovered) is not None:
            self._lasting.recovered = None
            cost_s = time.monotonic() - recovered.noticed
            if self._comm.rank == 0:
                self._write("restore", cost_s=round(cost_s, 3), step=step, source=self._restored_from)
            self._say(f"step {step} is done {cost_s:.1f} s after the loss was noticed")
        if self._copies is None:
            return False
        if not self._copies.is_prepared:  # not before the first step, which makes the state of the optimizer
            first = collect()
            self._keep(lambda copies: copies.prepare(first.tensors, first.meta))
        if self._copies is None or step % self._config.train.copy_every:
            return False
        self._take(step, collect)
        return self._copies is not None

    def _take(self, step: int, collect: Callable[[], Collected]) -> None:
        state = collect()
        self._keep(lambda copies: copies.take(step, state.tensors, state.meta))

    def _keep(self, act: Callable[[StateCopies], None]) -> None:
        """Act on the copies. If node memory is full, the run goes on without further ones, and says so once."""
        assert self._copies is not None
        try:
            act(self._copies)
        except OSError as error:  # on all ranks
            self._copies.give_up()
            self._copies = None
            self._say(
                f"no further copies of the state: {error}; after a loss the run goes on from the last checkpoint or copy, or from its "
                "start"
            )

    def went_back(self, step: int, collect: Callable[[], Collected]) -> None:
        """The run has gone back to the state after `step` steps: copies of later steps are of no use, and must not be found."""
        self._raise_lease()
        assert self._lease is not None
        if self._copies is not None:
            self._copies.close(remove=True)
            self._first_epoch = self._lease.number
            self._copies = StateCopies(self._comm, self._lease.run, self._lease.number)
            self._take(step, collect)
        else:
            _remove(self._comm, self._lease.run)  # those from before node memory was full

    def end(self) -> None:
        """The run has ended with a checkpoint, so that the copies are not needed."""
        self._report_losses()
        if self._copies is not None:
            share = self._copies.seconds / (time.monotonic() - self._begun)
            sent = (
                f", {show_bytes(self._copies.link_bytes)} a rank sent to other nodes"
                if self._comm.num_nodes > 1
                else ""
            )
            self._say(f"copies of the state have held up the training for {share:.1%} of its time{sent}")
            self._copies.close(remove=True)
        else:
            assert self._lease is not None
            _remove(self._comm, self._lease.run)

    def distrust(self) -> None:
        """Remove the copies, because replicas differ, and a copy has the values of one of them."""
        if self._copies is not None:
            self._copies.close(remove=True)
            self._copies = None
        if self._lease is not None:
            _remove(self._comm, self._lease.run)

    def abandon(self) -> None:
        """End the copies after a loss of ranks, or an error of this rank. The files stay. Not collective."""
        if self._copies is not None:
            self._copies.abandon()

    @property
    def lease(self) -> Lease | None:
        """The lease, for checkpoints."""
        return self._lease

    def _write(self, event: str, **fields: Any) -> None:
        """Append an event, on rank 0. A full disk must not end the run: metrics and checkpoints report it."""
        with suppress(OSError):
            self._run.write_event(event, **fields)

    def _raise_lease(self) -> None:
        self._lease = on_rank0(self._comm, self._run.take_lease)


class StatesInMemory:
    """The copies in node memory, as good states for rewinds. `load`: puts back the state of a source, on all ranks together."""

    def __init__(self, find: Callable[[int], NodeCopies | None], load: Callable[[NodeCopies], object]) -> None:
        """`find`: the newest good copies with fewer steps than that."""
        self._find, self._load = find, load
        self._found: NodeCopies | None = None

    def newest(self, below: int) -> int | None:
        self._found = self._find(below)
        return None if self._found is None else self._found.step

    def restore(self, below: int) -> None:
        found, self._found = self._found, None  # else the memory of removed copies would stay
        assert found is not None
        self._load(found)


class Inheritance:
    """In place of `Endurance` in a job that is not elastic, which takes over the copies that an elastic job of the run has left.

    The job begins with their state, saves it as a checkpoint, and removes them. It makes none of its own. All methods but `before_step`
    and `abandon` are collective.
    """

    lease = None

    def __init__(self, config: Config, comm: Communicator, run: TrainingRun) -> None:
        self._config, self._comm, self._folder = config, comm, run.folder
        self._run: str | None = None  # of the copies, until they are removed
        self._is_used = False

    def find(self, age: Age) -> NodeCopies | None:
        """As `Endurance.find`."""
        there = on_rank0(self._comm, lambda: read_lease(self._folder))
        if there is None:
            return None
        self._run = there.run
        hold(self._run)
        own = there._replace(number=there.number + 1)
        since = 0 if self._config.resume == "auto" else first_number(own, os.environ.get(marks.LEASE_VARIABLE))
        found = _newer_copies(self._comm, self._run, age, since)
        self._is_used = found is not None
        return found

    def begin(self, source: str, step: int) -> None:
        """Remove copies that this job does not need, also those of a run that was moved aside."""
        if not self._is_used:
            self.end()

    def before_step(self) -> None:
        """Nobody asks for it."""

    def find_good(self, below: int) -> None:
        """A rewind finds none."""

    def after_step(self, step: int, collect: Callable[[], Collected]) -> bool:
        return False

    def went_back(self, step: int, collect: Callable[[], Collected]) -> None:
        """Nothing has to change."""

    def end(self) -> None:
        """The state is in a checkpoint: remove the copies."""
        if self._run is not None:
            _remove(self._comm, self._run)
            self._run = None

    def distrust(self) -> None:
        """There are no copies of this job."""

    def abandon(self) -> None:
        """The copies stay for another job."""


def _newer_copies(comm: Communicator, run: str, age: Age, since: int) -> NodeCopies | None:
    """The copies of a run with a lease from the number `since` on, if they are newer than the checkpoint of this age."""
    found = find_state(comm, run, from_epoch=since)
    # Any state of this run is later than the one of another run from which it began.
    if found is None or age.run not in ("", run):
        return found
    # After a rewind, a later state has fewer steps. A job that was not elastic has no lease.
    return None if (found.epoch if age.lease else 0, found.step) < (age.lease, age.step) else found


def _remove(comm: Communicator, run: str) -> None:
    if comm.node.rank == 0:
        remove_all(run)
