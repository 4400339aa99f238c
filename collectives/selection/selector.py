"""The selection of an algorithm: the names, the obstacles, and the choice of "auto" from a table of measurements (table.py).

All functions are pure: ranks with the same arguments get the same answer. "Bytes" always means the bytes of the whole array: `x` of
all_reduce, reduce_scatter, broadcast, reduce, all_to_all and of scatter's root, `out` of all_gather and of gather's root.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from collectives.arrays.dtypes import DType
from collectives.codec.formats import FORMATS
from collectives.schedules import BUILDERS

_OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
)  # fmt: skip
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "reduce"})

# The algorithms that are not schedules: "mpi" is the MPI library's own, "shared" reads the peers' arrays on the node, "staged" copies
# through ring buffers in the node's memory, "nccl" is for arrays in GPU memory. "encoded" sends data between nodes in a wire format.
_OTHERS = {
    "mpi": frozenset(_OPERATIONS),
    "shared": frozenset(_OPERATIONS),
    "staged": frozenset(_OPERATIONS),
    "two_level": REDUCTIONS | {"all_gather", "broadcast"},
    "encoded": frozenset({"all_reduce", "reduce_scatter", "all_gather"}),
    "nccl": frozenset(_OPERATIONS),
}
WITHIN_NODE = frozenset({"shared", "staged"})
# The algorithms of each operation, besides "auto".
ALGORITHMS: dict[str, tuple[str, ...]] = {
    operation: (
        *(name for name, takes in _OTHERS.items() if operation in takes),
        *(name for name in BUILDERS[operation] if name not in _OTHERS),
    )
    for operation in _OPERATIONS
}

# The memory of an array: a rank's own, or an array of this communicator's `empty` (for all_gather: `out` in an array of `shared`).
MEMORIES = ("private", "node")
# The operations whose choice depends on the memory.
NODE_OPERATIONS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
# Here all ranks of a node write to one array. On one node only "shared" waits until no rank reads the old values, so "auto" always
# takes it. On several nodes "mpi" gathers into another array first (see transports/mpi.py), and "auto" takes it for short arrays alone.
# On 3 ranks (1 + 2) the copy makes it slower than a schedule from 192 KiB on: 1.4 and 0.9 ms for 768 KiB; for 48 KiB 0.24 and 0.34 ms.
_ONE_ARRAY = frozenset({("all_gather", "node")})
_COPIED_BYTES = 128 << 10

EXACT = "fp32"  # the wire format in which elements of all dtypes are sent as they are
_ENCODED_DTYPES = ("float32", "float16", "bfloat16")
_ENCODED_OPS = (None, "sum", "avg")  # None: an all-gather
# "auto" encodes only arrays of more elements for each rank: the elements of a message, because the ranks exchange their parts directly.
# On two hosts a short all-reduce takes 55 us more with its two encoded messages. At 1 Gbit/s int8 saves that from 1,150 elements on.
UNENCODED_ELEMENTS = 1024
# What a group passes as `algorithm` for arrays that it has packed: "auto", but never "encoded", because they would share the scales of
# blocks. A name of its own, so that no plan of such a call serves another one.
UNENCODED = "unencoded"

# MPI 3 counts in int. A larger message needs a datatype of several elements, and MPI's reductions do not accept this datatype.
MAX_COUNT = (1 << 31) - 1
_COUNTED = REDUCTIONS | {"all_gather"}

# Without a table: up to this size, few rounds are faster than few bytes (measured on 2 and 4 ranks of one machine).
SHORT_BYTES = 32 << 10
_SHORT = ("recursive_doubling", "tree")
_LONG = ("two_level", "halving_doubling", "halving", "ring", "reduce_scatter_gather", "scatter_all_gather", "tree")


class Placement(NamedTuple):
    """The sizes of a communicator that select an algorithm: its ranks, its nodes, the ranks of its smallest and its largest node."""

    size: int
    num_nodes: int
    smallest_node: int
    largest_node: int

    @classmethod
    def of(cls, node_sizes: Sequence[int]) -> "Placement":
        """From the number of ranks on each node."""
        return cls(sum(node_sizes), len(node_sizes), min(node_sizes), max(node_sizes))


def obstacle(operation: str, algorithm: str, *, placement: Placement, itemsize: int = 1, nbytes: int = 0) -> str | None:
    """The reason why `algorithm` cannot carry out `operation` on these arrays, as words after its name; None if it can."""
    if algorithm == "mpi" and operation in _COUNTED and nbytes > MAX_COUNT * itemsize:
        return f"takes up to {MAX_COUNT} elements, not {nbytes // itemsize}"
    if algorithm in WITHIN_NODE and placement.num_nodes > 1:
        return f"works within one node, not on {placement.num_nodes}"
    if algorithm == "nccl":  # transports/gpu/device.py handles arrays in GPU memory
        return "works on arrays in GPU memory"
    if algorithm in ("two_level", "encoded"):
        if placement.num_nodes == 1:
            return "works across nodes, and all these ranks are on one"
        if placement.largest_node == 1 and algorithm == "two_level":
            return "needs several ranks on each node, and there is one"
        if placement.smallest_node != placement.largest_node:
            return f"needs the same number of ranks on each node; here {placement.smallest_node} to {placement.largest_node}"
    return None


def obstacle_to_encoding(wire: str, dtype: DType, op: str | None) -> str | None:
    """The reason why "encoded" cannot send these elements in the format `wire`, as words after its name; None if it can."""
    if wire == EXACT:
        return f"needs a wire format below {EXACT}: call comm.with_wire('int8')"
    if dtype.name not in _ENCODED_DTYPES:
        return f"sends {', '.join(_ENCODED_DTYPES)}, not {dtype.name}"
    if op not in _ENCODED_OPS:
        return f"computes sum and avg, not {op}"
    return None


def kind_of(operation: str, dtype: DType) -> str:
    """The table's word for a dtype: "half" for a reduction of fp16 or bf16, which MPI cannot compute, otherwise "native"."""
    return "half" if dtype.mpi is None and operation in REDUCTIONS else "native"


def schedule_by_rule(operation: str, nbytes: int) -> str:
    """The schedule for `operation` on `nbytes` bytes without a measurement."""
    rule = (*_SHORT, *_LONG) if nbytes <= SHORT_BYTES else _LONG
    return next(name for name in rule if name in BUILDERS[operation] and name != "two_level")


class Choices(Protocol):
    """The answer of a table (see `table.Table`): pairs of (largest number of bytes, algorithm), rising; None: any number of bytes."""

    def choices(
        self, operation: str, kind: str, memory: str, placement: Placement
    ) -> Sequence[tuple[int | None, str]]: ...


class Selector:
    """The choices of one communicator: the table resolved for its `placement`, once for each (operation, memory, dtype).

    `infeasible`: algorithms that cannot run on these ranks for a reason other than their placement, each with the reason. `wire`: the
    format of data between nodes; the attribute is "fp32" if "encoded" cannot run on these ranks.
    """

    __slots__ = ("_answers", "_infeasible", "_placement", "_table", "wire")

    def __init__(
        self, table: Choices, placement: Placement, infeasible: Mapping[str, str] | None = None, wire: str = EXACT
    ) -> None:
        self._table, self._placement, self._infeasible = table, placement, infeasible or {}
        can_encode = "encoded" not in self._infeasible and not obstacle("all_reduce", "encoded", placement=placement)
        self.wire = wire if can_encode else EXACT
        self._answers: dict[tuple[str, str, DType], tuple[list[float], list[str]]] = {}

    def choose(
        self,
        operation: str,
        algorithm: str,
        *,
        dtype: DType,
        nbytes: int,
        memory: str = "private",
        op: str | None = None,
    ) -> str:
        """The algorithm that carries out a call with the argument `algorithm`, which may be "auto". `memory`: one of MEMORIES.

        `op`: of a reduction. ValueError if `algorithm` is unknown or cannot work on these arrays.
        """
        if algorithm in ("auto", UNENCODED):
            if algorithm == "auto" and self.wire != EXACT and self._encoding_pays(operation, dtype, nbytes, op):
                return "encoded"
            key = (operation, memory, dtype)
            limits, names = self._answers.get(key) or self._resolve(*key)
            return names[bisect_left(limits, nbytes)]
        known = ALGORITHMS[operation]
        if algorithm not in known:
            raise ValueError(f"{operation}: algorithm {algorithm!r} is unknown; expected auto, {', '.join(known)}")
        why = self.why_not(operation, algorithm, dtype=dtype, nbytes=nbytes, op=op)
        if why is not None:
            others = [
                name for name in known if self.why_not(operation, name, dtype=dtype, nbytes=nbytes, op=op) is None
            ]
            raise ValueError(f"{operation}: algorithm {algorithm!r} {why}; use {' or '.join(('auto', *others))}")
        return algorithm

    def feasible(self, operation: str, *, dtype: DType, nbytes: int) -> list[str]:
        """The algorithms that `choose` accepts by name. ValueError for an unknown operation."""
        if operation not in ALGORITHMS:
            raise ValueError(f"operation {operation!r} is unknown; expected {', '.join(ALGORITHMS)}")
        return [
            name for name in ALGORITHMS[operation] if self.why_not(operation, name, dtype=dtype, nbytes=nbytes) is None
        ]

    def why_not(
        self, operation: str, algorithm: str, *, dtype: DType, nbytes: int, op: str | None = None
    ) -> str | None:
        """The reason why `algorithm` cannot carry out `operation` here, as words after its name; None if it can."""
        if algorithm in self._infeasible:
            return f"cannot be used here: {self._infeasible[algorithm]}"
        why = obstacle(operation, algorithm, placement=self._placement, itemsize=dtype.itemsize, nbytes=nbytes)
        if why is None and algorithm == "encoded":
            return obstacle_to_encoding(self.wire, dtype, op)
        return why

    def _encoding_pays(self, operation: str, dtype: DType, nbytes: int, op: str | None) -> bool:
        """Whether "auto" takes "encoded". A gather of a half type in a format of two bytes would only lose precision."""
        return (
            "encoded" in ALGORITHMS[operation]
            and nbytes > UNENCODED_ELEMENTS * self._placement.size * dtype.itemsize
            and not (operation == "all_gather" and FORMATS[self.wire].itemsize >= dtype.itemsize)
            and self.why_not(operation, "encoded", dtype=dtype, nbytes=nbytes, op=op) is None
        )

    def has_choice(self, operation: str, *, dtype: DType, memory: str) -> bool:
        """Whether "auto" can choose between several algorithms."""
        several = len(self.feasible(operation, dtype=dtype, nbytes=1)) > 1
        return several and (operation, memory) not in _ONE_ARRAY

    def _resolve(self, operation: str, memory: str, dtype: DType) -> tuple[list[float], list[str]]:
        limits: list[float] = []
        names: list[str] = []
        begin = 0.0
        is_one_array = (operation, memory) in _ONE_ARRAY
        wanted_alone = "shared" if is_one_array and self._placement.num_nodes == 1 else None
        largest = MAX_COUNT * dtype.itemsize  # for more bytes another algorithm may be needed
        for up_to, wanted in self._table.choices(operation, kind_of(operation, dtype), memory, self._placement):
            end = float("inf") if up_to is None else up_to
            for limit in sorted({min(end, largest), end, *([min(end, _COPIED_BYTES)] if is_one_array else [])}):
                if limit <= begin:
                    continue
                name = self._near(operation, wanted_alone or wanted, memory, dtype, begin, limit)
                if names and names[-1] == name:
                    limits[-1] = limit
                else:
                    limits.append(limit)
                    names.append(name)
                begin = limit
        self._answers[operation, memory, dtype] = limits, names
        return limits, names

    def _near(self, operation: str, wanted: str, memory: str, dtype: DType, begin: float, end: float) -> str:
        """`wanted`, or the algorithm nearest to it if it cannot work, for more than `begin` and up to `end` bytes."""
        rule = (*_SHORT, *_LONG) if end <= SHORT_BYTES else _LONG
        reducing_halves = kind_of(operation, dtype) == "half"  # MPI would first convert them to fp32
        # The table chose two_level for its bandwidth; with one rank per node there is one level.
        ours_first = reducing_halves or wanted == "two_level"
        order = (wanted, *rule, "mpi") if ours_first else (wanted, "mpi", *rule)
        if (operation, memory) in _ONE_ARRAY and self._placement.num_nodes > 1 and begin >= _COPIED_BYTES:
            order = (*(name for name in order if name != "mpi"), "mpi")
        nbytes = int(begin) + 1
        for name in order:
            if name in ALGORITHMS[operation] and self.why_not(operation, name, dtype=dtype, nbytes=nbytes) is None:
                return name
        return "mpi"
