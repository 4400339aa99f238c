"""Which rank an operation has waited for, from the flight records of all ranks. Pure: NumPy alone.

The operations of several ranks that meet have one key: the same collective of a communicator, or a message and its receive. Some of
them free others by their begin (whoever sends, or brings a part of a sum), and some wait for that (whoever receives, or gets the sum).
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpitrain.job.record.trace.clocks import Line

FREES, WAITS = 1, 2
LEAST_WAIT_S = 1e-6
"""A shorter time is no wait."""

_BOTH = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_BOTH_ALSO_EMPTY = ("all_gather_object", "barrier", "together")
_FROM_ROOT = ("broadcast", "scatter", "broadcast_object")
_TO_ROOT = ("reduce", "gather")


def role(name: str, *, elements: int, is_root: bool) -> int:
    """What an operation does for those that it meets: FREES, WAITS, both as FREES | WAITS, or 0 if nothing is certain."""
    if name in _BOTH_ALSO_EMPTY or (name in _BOTH and elements):
        return FREES | WAITS
    if name in _FROM_ROOT and (elements or name.endswith("object")):
        return FREES if is_root else WAITS
    if name in _TO_ROOT and elements:
        return WAITS if is_root else FREES
    return {"send": FREES, "isend": FREES, "recv": WAITS, "irecv": WAITS}.get(name, 0)


def key(words: str) -> int:
    """A number of 63 bits for a text, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1


class Meetings(NamedTuple):
    """The operations of one rank that meet others, one in each place. Times are seconds of rank 0's clock."""

    keys: NDArray[np.int64]
    roles: NDArray[np.int64]
    """Without WAITS where no thread has waited."""
    entered: NDArray[np.float64]
    begun: NDArray[np.float64]
    """When a thread began to wait in the operation."""
    ended: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, float, float, float]]) -> "Meetings":
        """From (key, role, entered, begun, ended) of each operation."""
        keys, roles, *times = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        return cls(np.array(keys, np.int64), np.array(roles, np.int64), *(np.array(each, float) for each in times))

    def moved(self, line: Line) -> "Meetings":
        """The same with corrected times."""
        return self._replace(entered=line(self.entered), begun=line(self.begun), ended=line(self.ended))


class Last(NamedTuple):
    """For each operation of a rank, the one of another rank that it has waited for."""

    rank: NDArray[np.int64]
    """The rank of the other operation; -1: there is none."""
    place: NDArray[np.int64]
    """Its place in that rank's Meetings."""
    entered: NDArray[np.float64]
    """When the other rank entered it."""


def last_of_others(everyone: Sequence[Meetings]) -> list[Last]:
    """For each rank and operation that waits, the operation of another rank that frees it and was entered last."""
    counts = [len(each.keys) for each in everyone]
    ranks = np.repeat(np.arange(len(everyone)), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    keys, roles, entered, *_ = (np.concatenate(parts) for parts in zip(*everyone, strict=True))
    free = np.flatnonzero(roles & FREES)
    free = free[np.lexsort((entered[free], keys[free]))]
    if not len(free):
        return [Last(np.full(count, -1), np.zeros(count, np.int64), np.zeros(count)) for count in counts]
    at = np.searchsorted(keys[free], keys, "right") - 1
    at -= ranks[free[at]] == ranks  # a rank does not wait for itself, and has each key once
    found = free[np.maximum(at, 0)]
    has = (at >= 0) & (keys[found] == keys) & (roles & WAITS > 0)
    ends = np.cumsum(counts)[:-1]
    columns = (np.where(has, ranks[found], -1), places[found], entered[found])
    return [Last(*of_rank) for of_rank in zip(*(np.split(column, ends) for column in columns), strict=True)]


class Met:
    """Which operation waited for which, of all ranks: the same on all of them. The lists have an element for each rank."""

    def __init__(self, everyone: Sequence[Meetings]) -> None:
        self.last = last_of_others(everyone)
        self.waited: list[NDArray[np.float64]] = []
        """For how many seconds a thread has waited until the last other rank entered each operation; 0: not at all."""
        self.has_arrow: list[NDArray[np.bool_]] = []
        """To each operation from the last one that it waited for, or from its message."""
        self.num_back_in_time = 0
        """Operations that ended before one that they waited for was entered. They have no arrow."""
        self._first = np.cumsum([0, *(len(each.keys) for each in everyone)])
        for mine, last in zip(everyone, self.last, strict=True):
            waits = last.rank >= 0
            is_late = waits & (last.entered > mine.ended)
            waits &= ~is_late
            waited = np.where(waits, np.maximum(last.entered - mine.begun, 0.0), 0.0)
            self.waited.append(waited)
            self.has_arrow.append(waits & ((waited > LEAST_WAIT_S) | (mine.roles & FREES == 0)))
            self.num_back_in_time += int(is_late.sum())

    def arrow(self, rank: int, place: int) -> int:
        """The number of the arrow to that operation of the rank."""
        return int(self._first[rank]) + place


def corrections(everyone: Sequence[Meetings], host_of: Sequence[int]) -> list[Line]:
    """For each rank the line to apply to its times, so that no operation ends before one that it waits for was entered.

    The clocks of hosts are known to some microseconds. A message that arrives before it was sent shows the rest of the error. Then the
    lines of both hosts move until it does not at these times, except for that of rank 0's host. (The relaxation method for linear
    inequalities of Agmon and Motzkin, 1954.) The true clocks are a solution, if they drift evenly. The method ends after
    `_MAX_MOVES`, as a wrong record may have none.
    """
    begin = min((float(each.entered.min()) for each in everyone if len(each.keys)), default=0.0)
    span = max((float(each.ended.max()) for each in everyone if len(each.keys)), default=0.0) - begin
    ends = {host: np.zeros(2) for host in host_of}  # seconds at the begin and at the end

    def lines() -> list[Line]:
        return [
            Line(begin, float(ends[host][0]), float(ends[host][1] - ends[host][0]) / (span or 1.0)) for host in host_of
        ]

    def weights(when: float) -> np.ndarray:
        share = (when - begin) / (span or 1.0)
        return np.array([1 - share, share])

    for _ in range(_MAX_MOVES if len(ends) > 1 else 0):
        now = [each.moved(line) for each, line in zip(everyone, lines(), strict=True)]
        worst: dict[int, tuple[float, list[tuple[int, np.ndarray]]]] = {}  # by host: how late, and which lines move
        for rank, (mine, last) in enumerate(zip(now, last_of_others(now), strict=True)):
            late = np.where(last.rank >= 0, last.entered - mine.ended, -np.inf)
            host = host_of[rank]
            if len(late) and late.max() > (worst[host][0] if host in worst else 0.0):
                at = int(late.argmax())
                sender, place = int(last.rank[at]), int(last.place[at])
                both = [(host, weights(float(everyone[rank].ended[at]))),
                        (host_of[sender], -weights(float(everyone[sender].entered[place])))]  # fmt: skip
                worst[host] = float(late[at]), [(its, by) for its, by in both if its != host_of[0]]
        if not worst:
            break
        moved: set[int] = set()
        for late_s, moves in sorted(worst.values(), key=lambda its: -its[0]):
            if moved.isdisjoint(host for host, _ in moves):  # a sender to many hosts moves once, for the latest of them
                squares = sum(by @ by for _, by in moves)
                for host, by in moves:
                    ends[host] += _RELAXATION * (late_s + _MARGIN_S) / squares * by
                    moved.add(host)
    return lines()


_MAX_MOVES = 200
_RELAXATION = 1.5
"""Of the distance to a solution, below 2 (Agmon's is 1): lines that bound each other come to rest in fewer moves."""
_MARGIN_S = 1e-7
