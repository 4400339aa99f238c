"""Proves a schedule: each result contains every contribution exactly once, all ranks have the same bits, and the cost fits the formula.

The proof moves no elements, but a number for the contents of each chunk of each rank. In operations that only move data it is the
number of a part, which is exact for any number of ranks. In reductions it is a sum of the ranks' weights. Up to 64 ranks a weight is a
single bit, which is exact too. Beyond 64 ranks weights are random 64-bit numbers from a fixed seed, summed modulo 2^64: a sum with one
contribution too many or too few looks right with probability 2^-64 (with d of them: 2^-64 times the largest power of two in d).
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from collectives.schedules import BUILDERS, PIPELINED, ROOTED, TWO_LEVEL
from collectives.schedules.schedule import Cost, Schedule, Setup
from collectives.schedules.trace import ScheduleError, Trace, trace

__all__ = ["EXACT_RANKS", "ScheduleError", "check", "setups"]

EXACT_RANKS = 64
_REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
_BATCH = 1 << 18  # chunks that NumPy processes at once


def check(schedule: Schedule) -> Cost:
    """Prove `schedule`. Returns its cost, which equals its formula. ScheduleError with the place of the first error found."""
    if schedule.operation not in BUILDERS:
        raise ScheduleError(f"operation {schedule.operation!r} has no rule for its result")
    run = trace(schedule)
    _check_data(run)
    cost = Cost(run.num_rounds, Fraction(run.sent(), schedule.chunks_per_buffer))
    if cost != schedule.cost:
        raise ScheduleError(f"costs {_shown(cost)}, but the formula says {_shown(schedule.cost)}")
    return cost


def setups(operation: str, algorithm: str, size: int) -> Iterator[Setup]:
    """The cases for which an algorithm is proved at this number of ranks: several roots, sizes of nodes, and numbers of segments.

    Up to 64 ranks: the first and the last rank as roots, and nodes of every size that divides `size`; beyond: one root, one node size.
    """
    few = size <= EXACT_RANKS
    roots = [0] if operation not in ROOTED else sorted({0, size - 1}) if few else [size // 3]
    nodes = [1]
    if algorithm in TWO_LEVEL:
        divisors = [g for g in range(1, size + 1) if size % g == 0]
        nodes = [1, size, *divisors[1:-1]] if few else [min(divisors, key=lambda g: abs(g - 8))]
    for root in roots:
        for per_node in dict.fromkeys(nodes):
            for num_segments in [1, 2, 5] if algorithm in PIPELINED else [1]:
                yield Setup(size, root, per_node, num_segments)


def _shown(cost: Cost) -> str:
    return f"{cost.rounds} rounds and {cost.traffic} of the buffer"


def _check_data(run: Trace) -> None:
    schedule = run.schedule
    held = _initial(schedule)
    arrays = [held]
    if schedule.operation == "all_reduce":
        # Sums of the same contributions have the same bits only if the order of additions is the same: each sum has a hash of it.
        arrays.append(_mixed(np.arange(held.size, dtype=np.uint64)).reshape(held.shape))
    # Messages are read in their round and written when their step at the receiver ends.
    written_in = run.last_round[run.recv_step]
    waiting: list[tuple[np.ndarray, list[np.ndarray]]] = []
    for round_, (begin, end) in enumerate(zip(run.bounds[:-1], run.bounds[1:], strict=True), start=1):
        waiting += [(batch, _read(run, arrays, batch)) for batch in _batches(run.count, begin, end)]
        later = []
        for batch, values in waiting:
            due = written_in[batch] == round_
            for now, reduce in ((due & ~run.reduce[batch], False), (due & run.reduce[batch], True)):
                if now.any():
                    _write(run, arrays, *_taken(run, batch, values, now), reduce)
            if not due.all():
                later.append(_taken(run, batch, values, ~due))
        waiting = later
    _check_result(schedule, held)
    for order in arrays[1:]:
        for rank, chunk in np.argwhere(order != order[0])[:1]:
            raise ScheduleError(f"ranks 0 and {rank} add up chunk {chunk} in different orders: their bits may differ")


def _batches(count: np.ndarray, begin: int, end: int) -> Iterator[np.ndarray]:
    """Messages begin .. end-1 in pieces of about _BATCH chunks."""
    total = np.cumsum(count[begin:end])
    if total[-1] <= _BATCH:
        yield np.arange(begin, end)
    else:
        cuts = np.searchsorted(total, np.arange(_BATCH, total[-1], _BATCH)) + 1
        yield from (batch for batch in np.split(np.arange(begin, end), cuts) if len(batch))


def _taken(
    run: Trace, batch: np.ndarray, values: list[np.ndarray], which: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Some messages of a batch, with their values."""
    if which.all():
        return batch, values
    chunks = np.repeat(which, run.count[batch])
    return batch[which], [value[chunks] for value in values]


def _places(rank: np.ndarray, chunk: np.ndarray, count: np.ndarray, num_chunks: int) -> np.ndarray:
    """The flat index of each chunk of some messages in an array (rank, chunk)."""
    before = np.cumsum(count) - count
    places = np.arange(count.sum()) + np.repeat(rank * num_chunks + chunk - before, count)
    if (chunk + count > num_chunks).any():  # the first chunk follows the last one
        places -= num_chunks * (places >= np.repeat((rank + 1) * num_chunks, count))
    return places


def _read(run: Trace, arrays: Sequence[np.ndarray], batch: np.ndarray) -> list[np.ndarray]:
    chunks = run.schedule.num_chunks
    places = _places(run.source[batch], run.chunk[batch], run.count[batch], chunks)
    values = [array.reshape(-1)[places] for array in arrays]
    for i in np.flatnonzero(values[0] == 0)[:1]:
        raise ScheduleError(f"rank {places[i] // chunks} sends chunk {places[i] % chunks} before anything stands in it")
    return values


def _write(
    run: Trace, arrays: Sequence[np.ndarray], batch: np.ndarray, values: Sequence[np.ndarray], reduce: bool
) -> None:
    chunks = run.schedule.num_chunks
    places = _places(run.destination[batch], run.recv_chunk[batch], run.count[batch], chunks)
    if reduce:
        mine = [array.reshape(-1)[places] for array in arrays]
        wrong = [(mine[0] == 0, "adds to chunk {} before anything stands in it")]
        if run.schedule.operation not in _REDUCING:
            wrong.append((mine[0] != 0, "adds to chunk {}, which is only to be moved"))
        elif run.schedule.size <= EXACT_RANKS:
            wrong.append((mine[0] & values[0] != 0, "adds a contribution twice to chunk {}"))
        for mask, text in wrong:
            for i in np.flatnonzero(mask)[:1]:
                raise ScheduleError(f"rank {places[i] // chunks} " + text.format(places[i] % chunks))
        sums = [old + new for old, new in zip(mine, values, strict=True)]
        values = [sums[0], *map(_mixed, sums[1:])]
    for array, value in zip(arrays, values, strict=True):
        array.reshape(-1)[places] = value


def _weights(size: int) -> np.ndarray:
    if size <= EXACT_RANKS:
        return np.uint64(1) << np.arange(size, dtype=np.uint64)
    return np.random.default_rng(2024).integers(1, 1 << 64, size, np.uint64)


def _initial(schedule: Schedule) -> np.ndarray:
    """The initial contents of chunk c of rank r, as an array (rank, chunk); 0 if it is empty."""
    size, chunks, root = schedule.size, schedule.num_chunks, schedule.root
    held = np.zeros((size, chunks), np.uint64)
    match schedule.operation:
        case "all_reduce" | "reduce_scatter" | "reduce":
            held[:] = _weights(size)[:, None]
        case "all_gather" | "gather":
            np.fill_diagonal(held, _parts(size))
        case "scatter" | "broadcast":
            held[root] = _parts(chunks)
        case "all_to_all":
            held[:, :size] = _parts(size * size).reshape(size, size)
    return held


def _parts(number: int) -> np.ndarray:
    return np.arange(1, number + 1, dtype=np.uint64)


def _check_result(schedule: Schedule, held: np.ndarray) -> None:
    size, chunks, root = schedule.size, schedule.num_chunks, schedule.root
    expected = np.zeros((size, chunks), np.uint64)  # 0: any contents
    everyone = _weights(size).sum(dtype=np.uint64)
    match schedule.operation:
        case "all_reduce":
            expected[:] = everyone
        case "reduce_scatter":
            np.fill_diagonal(expected, everyone)
        case "reduce":
            expected[root] = everyone
        case "all_gather" | "broadcast":
            expected[:] = _parts(chunks)
        case "gather":
            expected[root] = _parts(chunks)
        case "scatter":
            np.fill_diagonal(expected, _parts(chunks))
        case "all_to_all":
            expected[:, size:] = _parts(size * size).reshape(size, size).T
            np.fill_diagonal(expected[:, size:], 0)  # the executor copies a rank's own part
    for rank, chunk in np.argwhere((expected != 0) & (held != expected))[:1]:
        found, right = int(held[rank, chunk]), int(expected[rank, chunk])
        if schedule.operation in _REDUCING and size <= EXACT_RANKS:
            lost = [r for r in range(size) if not found >> r & 1]
            what = f"lacks the contributions of ranks {lost[:8]}"
        elif schedule.operation in _REDUCING:
            what = "does not end with every contribution exactly once"
        else:
            what = f"ends with part {found - 1}, expected {right - 1}" if found else "ends with nothing"
        raise ScheduleError(f"rank {rank} {what} in chunk {chunk}")


def _mixed(values: np.ndarray) -> np.ndarray:
    """A pseudo-random number for each value (the finaliser of SplitMix64), so that mixed(a + b) differs between pairs {a, b}."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values
