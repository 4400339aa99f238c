"""From measurements to the table that "auto" chooses from.

The choice is smooth: an algorithm takes over only where it is clearly faster, so that noise makes no thresholds. Among all ways to cut
the sizes into ranges of one algorithm each, the one that loses least against always taking the fastest wins; each change of algorithm
costs as much as being slower by CLEARLY at one size.
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
# An algorithm that takes so many times the best one's time is out at this size, and from SETTLED on at all larger ones.
HOPELESS = 2.0
SETTLED = 1 << 20  # bytes: from here on bandwidth decides, and an algorithm that lags behind stays behind
LEAST_ROUNDS = 3
# Of the rounds' times the lower quartile: a disturbance only ever adds, and thresholds are to outlast it.
QUANTILE = 0.25
DTYPES = {"native": TABLE["float32"], "half": TABLE["bfloat16"]}

Choices = tuple[tuple[int | None, str], ...]


def choose(seconds: Mapping[int, Mapping[str, float]]) -> Choices:
    """Thresholds from the time of every algorithm at each size, which all name the same algorithms. The first named wins a draw.

    A threshold lies half way (on a scale of ratios) between the two sizes that it divides.
    """
    sizes = sorted(seconds)
    names = list(seconds[sizes[0]])
    switch = log(1 + CLEARLY)
    loss = dict.fromkeys(names, 0.0)  # of the best choices so far that end with this name
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
    """(operation, memory, kind, dtype) where there is something to choose from."""
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
    """Measure every algorithm in each case, one after the other, and choose: the entry for this `comm`, and what it follows from.

    `seconds`: in all, kept as well as LEAST_ROUNDS at each size allow. Collective: the entries are the same on all ranks.
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
            if fixed:  # none where the node's memory is too small
                fixed |= dict.fromkeys(behind, inf)
                times[results[0].nbytes] = {name: fixed[name] for name in ALGORITHMS[operation] if name in fixed}
                measured += results
                if size >= SETTLED:
                    fastest = min(fixed.values())
                    behind |= {name for name, time in fixed.items() if time > HOPELESS * fastest}
        if times:
            # All ranks have the same figures: `measure` gives the slowest rank's.
            yield TableEntry(operation, kind, memory, comm.size, comm.num_nodes, choose(times)), measured
