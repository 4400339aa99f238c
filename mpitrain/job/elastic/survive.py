"""Goes on in place: makes an attempt again on the ranks that a loss of ranks has left."""

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ckpt.saving import background
from collectives import Communicator, recovery
from collectives.diagnosis.together import is_joint, share
from mpitrain.job.elastic.layout import Layout, next_layout

_DONE_TAG = 32000
_LOOK_S = 0.01
_MAX_FRUITLESS = 2  # recoveries in a row from losses without a new step before them


class LostRank(NamedTuple):
    """A rank that was lost: its number before the loss, its host and its process."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


class Recovered(NamedTuple):
    """The end of a recovery. Times are those of `time.monotonic`."""

    lost: list[LostRank]
    layout: Layout
    """Of the ranks that were left."""
    noticed: float
    seconds: float
    """From the notice of the loss to the new world."""
    causes: list[str]
    """What the monitors have said about the losses."""


def going_on(num: int, recovered: Recovered | None) -> str:
    """The beginning of a line, such as "lost rank 2 on host1 (process 4711): 3 ranks go on". None: without what was lost."""
    lost = "" if recovered is None else f"lost {', '.join(map(str, recovered.lost)) or 'no rank of this group'}: "
    num_idle = 0 if recovered is None else recovered.layout.num_idle
    return f"{lost}{num} {'ranks go' if num > 1 else 'rank goes'} on{f', {num_idle} without work,' if num_idle else ''}"


Attempt = Callable[[Communicator, Layout, Recovered | None], None]
"""Works to the end on the ranks of a communicator, which have this layout; after a loss also with what was recovered from."""


class RankProgress(NamedTuple):
    """What a rank has done so far: the greatest number of steps that it came to, and how often it has begun a step."""

    steps: int
    begun: int


class NoProgressError(RuntimeError):
    """Ranks were lost again and again, without a new step."""


class TooFewRanksError(RuntimeError):
    """Too few ranks are left to go on in place."""


def survive(
    attempt: Attempt,
    comm: Communicator,
    *,
    axes: Mapping[str, int],
    batches: int | None = None,
    whole_copies: bool = False,
    min_ranks: int = 1,
    progress: Callable[[], RankProgress] | None = None,
) -> None:
    """Call `attempt(comm, layout, None)`, and after each loss of ranks `attempt(comm, layout, recovered)` on those that are left, until
    one succeeds.

    Collective. `comm`: the world. `axes`, `batches`, `whole_copies`: of `next_layout`. A rank that has no place in the layout waits,
    and may have one after the next loss. Another exception of `attempt` ends this rank, and so is a loss for the others.
    TooFewRanksError on all ranks if fewer than `min_ranks` are left. NoProgressError on all ranks after three losses in a row
    without a new step, because an error of the data would end one rank after another. `progress`: of this rank; None: any number of
    losses.
    """
    recovery.survive_losses()
    best, num_fruitless, num_causes = RankProgress(-1, 0), 0, 0
    before: list[tuple[str, int]] = []  # the processes of the ranks before the losses that no attempt has learned of
    noticed = 0.0
    while True:
        try:
            layout = next_layout(axes, comm.size, batches=batches, whole_copies=whole_copies)
            processes, recovered = recovery.processes(comm), None
            if before:
                lost = [LostRank(rank, *each) for rank, each in enumerate(before) if each not in processes]
                seconds = time.monotonic() - noticed
                causes, known_causes = recovery.causes(comm, num_causes)
                recovered = Recovered(lost, layout, noticed, seconds, causes)
                if progress is not None:
                    now = RankProgress(*map(max, zip(*comm.all_gather_object(progress()), strict=True)))
                    if now.steps > best.steps:
                        num_fruitless = 0
                    elif now.begun > best.begun:  # else the loss was one in a recovery
                        num_fruitless += 1
                    best = now
                with comm.together():
                    _check_number(layout.num_used, min_ranks, lost)
                    _check_progress(num_fruitless, recovered)
                num_causes = known_causes
            before, noticed = processes, 0.0
            _attempt(attempt, comm, layout, recovered, whole_copies=whole_copies)
            if recovery.all_are_done():
                return
            noticed = noticed or time.monotonic()
        except Exception as error:
            if not recovery.ranks_were_lost():
                raise
            noticed = noticed or time.monotonic()
            _release(error)
            background.abandon()
        gc.unfreeze()  # the main job has frozen its model
        gc.collect()
        comm = recovery.recover()


def _check_number(num: int, min_ranks: int, lost: list[LostRank]) -> None:
    if num < min_ranks:
        left = f"{num} {'ranks have' if num > 1 else 'rank has'} work"
        raise TooFewRanksError(
            f"lost {', '.join(map(str, lost))}: {left}, and the smallest number that goes on is {min_ranks} (min_ranks), so the job "
            "ends. The same command goes on from the newest state, on any number of ranks"
        )


def _check_progress(num_fruitless: int, recovered: Recovered) -> None:
    if num_fruitless >= _MAX_FRUITLESS:
        raise NoProgressError(
            f"lost {', '.join(map(str, recovered.lost))}: {num_fruitless + 1} losses in a row without a new step, as by an error that "
            f"comes back at the same step, so the job ends. {'; '.join(recovered.causes)}"
        )


def _attempt(
    attempt: Attempt, comm: Communicator, layout: Layout, recovered: Recovered | None, *, whole_copies: bool
) -> None:
    """Call `attempt` on the ranks that have a place in the layout; the others wait for its end."""
    used = comm
    if layout.num_idle:
        together = layout.axes["tp"] * layout.axes["cp"] * (layout.axes["dp_shard"] if whole_copies else 1)
        order = _by_node(comm, together)
        place = order.index(comm.rank)
        chosen = comm.split(0 if place < layout.num_used else None, place)
        if chosen is None:
            _wait_for(comm, order[0])
            return
        used = chosen
    try:
        attempt(used, layout, recovered)
    except Exception as error:
        if not layout.num_idle or not is_joint(error, used.size):
            raise
        _tell_idle_ranks(comm, order, layout, failed=True)
        raise share(comm, error, order[0]) from error
    if layout.num_idle:
        _tell_idle_ranks(comm, order, layout, failed=False)


def _tell_idle_ranks(comm: Communicator, order: list[int], layout: Layout, *, failed: bool) -> None:
    if comm.rank == order[0]:
        for rank in order[layout.num_used :]:
            comm.send(np.array([failed], np.uint8), rank, _DONE_TAG)


def _by_node(comm: Communicator, group: int) -> list[int]:
    """All ranks in an order in which as many groups of `group` neighbours as possible are on one node."""
    whole = [rank for ranks in comm.nodes for rank in ranks[: len(ranks) // group * group]]
    return whole + [rank for ranks in comm.nodes for rank in ranks[len(ranks) // group * group :]]


def _wait_for(comm: Communicator, rank: int) -> None:
    """Wait, without load, until `rank` has ended its attempt. Its error is raised here too. An exception if a rank is lost."""
    failed = np.zeros(1, np.uint8)
    done = comm.irecv(failed, rank, _DONE_TAG)
    while not done.done():
        time.sleep(_LOOK_S)
    done.wait()
    if failed[0]:
        raise share(comm, None, rank)


def _release(error: BaseException) -> None:
    """Drop the variables of the frames that an exception has left: they hold the model of the attempt."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
