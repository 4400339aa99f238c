"""The run of a schedule: which send matches which receive, and in which round. For proofs (check.py) and prices (cost.py).

The trace assumes that a send waits for its receiver (MPI_Ssend): a schedule that ends here ends with any amount of buffering in the MPI
library. Messages between two ranks are received in the order of sending. NumPy processes all ranks of a round at once, so a million
messages take seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from collectives.schedules.schedule import Schedule, Step

_NOBODY = -(1 << 40)  # stands for no peer; a wrong schedule will not have this number
_NO_SEND = (_NOBODY, 0, 0)
_NO_RECV = (_NOBODY, 0, False, 0)


class ScheduleError(AssertionError):
    """The schedule is wrong: a deadlock, a contribution lost or counted twice, a chunk mistaken for another."""


@dataclass(frozen=True)
class Trace:
    """All messages in the order of the rounds, as 1-D arrays; those of round i are at `bounds[i]:bounds[i + 1]`.

    Steps are numbered over all ranks, so that a rank's next step has the next number. `before`: for each step the number of the rank's
    previous step, or `num_steps` for its first one. `last_round`: for each step the round in which both its parts have ended.
    """

    schedule: Schedule
    num_ranks: int  # the traced ranks: all, or a multiple of the period
    num_steps: int
    before: np.ndarray
    last_round: np.ndarray
    bounds: np.ndarray
    source: np.ndarray
    destination: np.ndarray  # the real rank, also if it is not traced
    send_step: np.ndarray
    recv_step: np.ndarray
    chunk: np.ndarray  # at the sender
    recv_chunk: np.ndarray
    count: np.ndarray
    reduce: np.ndarray

    @property
    def num_rounds(self) -> int:
        return len(self.bounds) - 1

    def sent(self) -> int:
        """The number of chunks that the busiest rank sends."""
        return int(np.bincount(self.source, self.count, self.num_ranks).max(initial=0))


def trace(schedule: Schedule, num_ranks: int | None = None) -> Trace:
    """Run `schedule` without data. ScheduleError if a step is invalid, or ranks wait for each other forever.

    `num_ranks`: trace only this many ranks, a multiple of `schedule.period` that divides the number of ranks; the others do the same.
    """
    num_ranks = schedule.size if num_ranks is None else num_ranks
    programs = [schedule.program(rank) for rank in range(num_ranks)]
    lengths = np.array([len(program) for program in programs])
    steps = _table(programs)
    rank = np.repeat(np.arange(num_ranks), lengths)
    _check_steps(schedule, rank, steps)
    peer_to, chunk, count, peer_from, recv_chunk, reduce, _ = steps.T
    ends = np.cumsum(lengths)
    firsts = ends - lengths

    partner = _match(schedule.size, num_ranks, rank, peer_to, peer_from)  # for each send the step that receives it
    num_steps = len(steps)
    owner = np.append(rank, 0)
    sent, received = peer_to == _NOBODY, peer_from == _NOBODY  # parts of steps that have ended or do not exist
    current = firsts.copy()
    last_round = np.zeros(num_steps, int)
    rounds: list[np.ndarray] = []
    while True:
        mine = current[current < ends]
        offered = mine[~sent[mine]]
        accepting = partner[offered]
        # Both ranks must be at these steps; a partner of -1 is never a rank's current step.
        ready = offered[(accepting >= 0) & (current[owner[accepting]] == accepting)]
        if not len(ready):
            break
        rounds.append(ready)
        taken = partner[ready]
        sent[ready] = received[taken] = True
        last_round[ready] = last_round[taken] = len(rounds)
        done = mine[sent[mine] & received[mine]]
        current[rank[done]] += 1

    stuck = np.flatnonzero(current < ends)
    if len(stuck):
        at = (current - firsts)[stuck[:8]]
        raise ScheduleError(f"deadlock: ranks {stuck[:8].tolist()} wait in steps {at.tolist()}")
    sends = np.concatenate([np.empty(0, int), *rounds])
    receives = partner[sends]
    before = np.arange(num_steps) - 1
    before[firsts[lengths > 0]] = num_steps
    if num_ranks == schedule.size:
        _check_messages(schedule, rank[sends], rank[receives], steps[sends], steps[receives])
    return Trace(
        schedule,
        num_ranks,
        num_steps,
        before,
        last_round,
        np.cumsum([0, *map(len, rounds)]),
        rank[sends],
        peer_to[sends],
        sends,
        receives,
        chunk[sends],
        recv_chunk[receives],
        count[sends],
        reduce[receives].astype(bool),
    )


def _table(programs: Sequence[Sequence[Step]]) -> np.ndarray:
    """A row for each step: to, chunk, count; from, chunk, reduce, count."""
    parts = (part for program in programs for send, recv in program for part in (send or _NO_SEND, recv or _NO_RECV))
    return np.fromiter(chain.from_iterable(parts), np.int64).reshape(-1, 7)


def _match(size: int, num_ranks: int, rank: np.ndarray, peer_to: np.ndarray, peer_from: np.ndarray) -> np.ndarray:
    """For each step the step that receives its message, or -1: the i-th send from a to b matches b's i-th receive from a."""
    sends, receives = np.flatnonzero(peer_to != _NOBODY), np.flatnonzero(peer_from != _NOBODY)
    # The key is made of the sender and the distance to the receiver, so it works within a period, too.
    send_key = rank[sends] * size + (peer_to[sends] - rank[sends]) % size
    recv_key = peer_from[receives] % num_ranks * size + (rank[receives] - peer_from[receives]) % size
    send_order, send_id = _numbered(send_key, len(rank))
    recv_order, recv_id = _numbered(recv_key, len(rank))
    partner = np.full(len(rank), -1)
    if len(receives):
        at = np.minimum(np.searchsorted(recv_id, send_id), len(receives) - 1)
        met = recv_id[at] == send_id
        partner[sends[send_order[met]]] = receives[recv_order[at[met]]]
    return partner


def _numbered(keys: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """(the order that sorts `keys`; for each sorted key a number made of the key and of the count of equal keys before it)."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    return order, keys * (limit + 1) + np.arange(len(keys)) - np.searchsorted(keys, keys)


def _check_steps(schedule: Schedule, rank: np.ndarray, steps: np.ndarray) -> None:
    size, chunks = schedule.size, schedule.num_chunks
    peer_to, chunk, count, peer_from, recv_chunk, reduce, recv_count = steps.T
    sends, receives = peer_to != _NOBODY, peer_from != _NOBODY
    for i in np.flatnonzero(~(sends | receives))[:1]:
        raise ScheduleError(f"rank {rank[i]} has a step that neither sends nor receives")
    for exists, peer, first, number in ((sends, peer_to, chunk, count), (receives, peer_from, recv_chunk, recv_count)):
        inside = (peer >= 0) & (peer < size) & (peer != rank)
        inside &= (first >= 0) & (first < chunks) & (number >= 1) & (number <= chunks)
        for i in np.flatnonzero(exists & ~inside)[:1]:
            raise ScheduleError(
                f"rank {rank[i]}: {number[i]} chunks from {first[i]} on, with rank {peer[i]}, are outside {size} ranks and "
                f"{chunks} chunks"
            )
    overlap = ((recv_chunk - chunk) % chunks < count) | ((chunk - recv_chunk) % chunks < recv_count)
    for i in np.flatnonzero(sends & receives & (reduce == 0) & overlap)[:1]:
        raise ScheduleError(f"rank {rank[i]} sends chunk {chunk[i]} and copies into it in one step")


def _check_messages(
    schedule: Schedule, source: np.ndarray, destination: np.ndarray, sends: np.ndarray, receives: np.ndarray
) -> None:
    """ScheduleError unless sender and receiver name the same chunks; in all_to_all only the number of chunks must be the same."""
    chunk, count, recv_chunk, recv_count = sends[:, 1], sends[:, 2], receives[:, 4], receives[:, 6]
    wrong = count != recv_count
    if schedule.operation != "all_to_all":
        wrong = wrong | (chunk != recv_chunk)
    for i in np.flatnonzero(wrong)[:1]:
        raise ScheduleError(
            f"rank {destination[i]} expects chunk {recv_chunk[i]} of rank {source[i]}, which sends {chunk[i]} "
            f"({recv_count[i]} and {count[i]} chunks)"
        )
