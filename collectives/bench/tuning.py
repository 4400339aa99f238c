"""Makes the table from which "auto" chooses out of measurements.

Another algorithm is chosen only if it is clearly faster, so that noise does not make thresholds. Of all ways to divide the sizes into
ranges of one algorithm each, `choose` takes the one with the least loss of time compared with the fastest algorithm at each size; each
change of algorithm counts like a loss of CLEARLY at one size.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf, log, sqrt
from time import monotonic

from collectives.arrays.dtypes import TABLE, DType
from collectives.bench.calls import Entrants
from collectives.bench.results import Measurement
from collectives.bench.timing import Limits, measure
from collectives.communicator.communicator import Communicator
from collectives.selection.selector import ALGORITHMS, MEMORIES, NODE_OPERATIONS, Selector, kind_of
from collectives.selection.table import KINDS, TableEntry

CLEARLY = 0.05
SIZES = tuple(256 << 2 * i for i in range(10))  # 256 B .. 64 MiB
QUICK_SIZES = SIZES[1::2]
# An algorithm that takes this many times the fastest one's time is dropped at this size, and from SETTLED on also at larger sizes.
HOPELESS = 2.0
SETTLED = 1 << 20  # bytes; from this size on bandwidth decides, so a slow algorithm stays slow at larger sizes
LEAST_ROUNDS = 3
# The result is the lower quartile of the rounds' times, because disturbances only add time, and the table should not depend on them.
QUANTILE = 0.25
DTYPES = {"native": TABLE["float32"], "half": TABLE["bfloat16"]}

Choices = tuple[tuple[int | None, str], ...]


def choose(seconds: Mapping[int, Mapping[str, float]]) -> Choices:
    """Thresholds from the times of the same algorithms at each size. Of equally good algorithms the first one is chosen.

    A threshold is the geometric mean of the two sizes that it separates.
    """
    sizes = sorted(seconds)
    names = list(seconds[sizes[0]])
    switch = log(1 + CLEARLY)
    loss = dict.fromkeys(names, 0.0)  # of the best choices so far that end with this algorithm
    chosen: dict[str, list[str]] = {name: [] for name in names}  # these choices
    for i, size in enumerate(sizes):
        fastest = min(seconds[size].values())
        stay = min(names, key=lambda name: loss[name])
        next_loss, next_chosen = {}, {}
        for name in names:
            from_ = name if i == 0 or loss[name] <= loss[stay] + switch else stay
            paid = 0.0 if from_ == name else switch
            next_loss[name] = loss[from_] + paid + log(seconds[size][name] / fastest)
            next_chosen[name] = [*chosen[from_], name]
        loss, chosen = next_loss, next_chosen
    best = chosen[min(names, key=lambda name: loss[name])]
    cuts = [(round(sqrt(sizes[i] * sizes[i + 1])), best[i]) for i in range(len(sizes) - 1) if best[i] != best[i + 1]]
    return (*cuts, (None, best[-1]))


def cases(comm: Communicator, operations: Sequence[str]) -> Iterator[tuple[str, str, str, DType]]:
    """(operation, memory, kind, dtype) of each case with several algorithms."""
    selector = Selector(comm.table, comm.placement)
    for operation in operations:
        for kind in KINDS:
            dtype = DTYPES[kind]
            if kind_of(operation, dtype) != kind:
                continue
            of_node = comm.num_nodes == 1 and operation in NODE_OPERATIONS
            for memory in MEMORIES if of_node else ("private",):
                if selector.has_choice(operation, dtype=dtype, memory=memory):
                    yield operation, memory, kind, dtype


def tune(
    comm: Communicator, *, operations: Sequence[str], sizes: Sequence[int] = SIZES, seconds: float = 90.0
) -> Iterator[tuple[TableEntry, list[Measurement]]]:
    """Measure every algorithm in each case, one case after the other. Yields the entry for this `comm` and its measurements.

    `seconds`: for all cases; it may take longer, because each size gets LEAST_ROUNDS. Collective: all ranks get the same entries.
    """
    todo = list(cases(comm, operations))
    deadline = monotonic() + seconds
    cells_left = len(todo) * len(sizes)
    for operation, memory, kind, dtype in todo:
        times: dict[int, dict[str, float]] = {}
        behind: set[str] = set()
        measured: list[Measurement] = []
        for size in sizes:
            share = comm.broadcast_object(max(0.0, deadline - monotonic()) / cells_left)
            cells_left -= 1
            entrants = Entrants((memory,), fixed_only=True, without=behind)
            limits = Limits(200, share, HOPELESS, LEAST_ROUNDS, QUANTILE)
            results, _ = measure(comm, operation, size, dtype, entrants, limits)
            fixed = {row.algorithm: row.seconds for row in results}
            if fixed:  # empty if node memory is too small
                fixed |= dict.fromkeys(behind, inf)
                times[results[0].nbytes] = {name: fixed[name] for name in ALGORITHMS[operation] if name in fixed}
                measured += results
                if size >= SETTLED:
                    fastest = min(fixed.values())
                    behind |= {name for name, time in fixed.items() if time > HOPELESS * fastest}
        if times:
            # All ranks have the same figures, because `measure` returns the slowest rank's times.
            yield TableEntry(operation, kind, memory, comm.size, comm.num_nodes, choose(times)), measured
