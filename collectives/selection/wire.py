"""The wire formats of a communicator: those that a caller may ask for, the choice of the network format "auto", and their codec."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collectives.arrays.dtypes import TABLE
from collectives.codec.choice import Chosen, chosen
from collectives.codec.coding import decode, decode_add, encode
from collectives.codec.formats import FORMATS
from collectives.codec.native import COMPILE_S
from collectives.diagnosis.hangs.deadline import Deadline
from collectives.selection.selector import EXACT, Selector

_log = logging.getLogger("collectives")

AUTO = "auto"
SMALL = "int8"  # the format that "auto" takes where it pays
# The most processor time of a node's codec, as a ratio to the time that the smaller format saves, with which "auto" takes it. The codec
# uses cores that training needs for its own work. So on a fast network a smaller format may save time and still not pay. Of an array of
# 16 MiB the codec takes 1.3 ms; between two hosts int8 saves 100 ms on a link of 1 Gbit/s, and 10 ms at 10 Gbit/s.
_MOST_CODEC = 0.05
_SIZES = (1 << 18, 1 << 20, 1 << 22)  # elements: arrays of 1, 4 and 16 MiB
_LEAST_S = 0.08  # the time of an exact all-reduce that is long enough to compare
_ROUNDS = 5


def network_format(wire: str | Mapping[str, str], name: str = "wire") -> str:
    """The format between nodes that `wire` asks for, or "auto". ValueError unless `wire` is one of these names, or a mapping
    {"node": "fp32", "network": one of them}, of which each key may be left out. `name`: of the argument, for the error."""
    known = (*FORMATS, AUTO)
    if isinstance(wire, str):
        wire = {"network": wire}
    if not isinstance(wire, Mapping) or not set(wire) <= {"node", "network"}:
        raise ValueError(
            f"{name}: {wire!r}; expected one of {', '.join(known)}, or {{'node': 'fp32', 'network': one of them}}"
        )
    if (node := wire.get("node", EXACT)) != EXACT:
        raise ValueError(
            f"{name}: node {node!r}; expected {EXACT!r}: ranks of a node read each other's memory, without a format"
        )
    if (network := wire.get("network", EXACT)) not in known:
        raise ValueError(f"{name}: network {network!r}; expected one of {', '.join(known)}")
    return network


def load_codec(node: Any) -> Chosen:
    """The codec of this process. One rank of `node`, a Communicator, compiles it if need be; then the others load its file. Collective.

    The others wait meanwhile, so a compiler gets a quarter of the deadline at most; it may run twice.
    """
    compile_s = min(COMPILE_S, Deadline.seconds / 4) if Deadline.seconds else COMPILE_S
    with node.together("loading the codec"):
        if node.rank == 0:
            chosen(compile_s=compile_s)
    return chosen(compile_s=0)


def measured(comm: Any) -> str:
    """SMALL if it saves much more time than its codec takes, else EXACT. Collective. `comm`: a Communicator where "encoded" can work.

    The ranks average an array in both formats, in turn. The time of a call is that of its slowest rank: so all get the same answer.
    """

    def seconds(algorithm: str) -> float:
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(x, "avg", algorithm=algorithm)
        return max(comm.all_gather_object(time.perf_counter() - start))

    for size in _SIZES:
        x = np.ones(size, np.float32)
        exact = Selector(comm.table, comm.placement).choose(
            "all_reduce", "auto", dtype=TABLE["float32"], nbytes=x.nbytes
        )
        if min(seconds(exact) for _ in range(3)) >= _LEAST_S:  # the first call makes connections
            break
    seconds("encoded")
    exact_s, encoded_s = zip(*((seconds(exact), seconds("encoded")) for _ in range(_ROUNDS)), strict=True)
    of_ranks = comm.all_gather_object(_codec_s(x[: x.size // comm.node.size]))
    codec_s = max(sum(of_ranks[rank] for rank in ranks) for ranks in comm.nodes)
    taken = SMALL if pays(exact_s, encoded_s, codec_s) else EXACT
    if comm.rank == 0:
        _log.info(
            "wire 'auto' is %s: an all-reduce of %d MiB takes %.1f ms in %s (%s) and %.1f ms in %s, for which a node's codec takes "
            "%.1f ms of processor time", taken, x.nbytes >> 20, 1e3 * float(np.median(exact_s)), EXACT, exact,
            1e3 * float(np.median(encoded_s)), SMALL, 1e3 * codec_s,
        )  # fmt: skip
    return taken


def pays(exact_s: Sequence[float], encoded_s: Sequence[float], codec_s: float) -> bool:
    """Whether the smaller format saves enough in all rounds but one, which a disturbance may have hit. The times are in seconds.

    `exact_s`, `encoded_s`: of an all-reduce in each round. `codec_s`: of all cores of a node; it is the same on any number of ranks.
    """
    saved_s = sorted(exact - encoded for exact, encoded in zip(exact_s, encoded_s, strict=True))
    return codec_s <= _MOST_CODEC * saved_s[1]


def _codec_s(x: np.ndarray) -> float:
    """The processor time to encode `x`, to add its decoded values, and to decode it: the work of a rank in an all-reduce."""
    fmt, total = FORMATS[SMALL], x.copy()
    data = np.zeros(fmt.nbytes(x.size), np.uint8)
    times = []
    for _ in range(1 + _ROUNDS):  # the first round gets the pages of `data`
        start = time.thread_time()
        encode(fmt, x, data)
        decode_add(fmt, data, total)
        decode(fmt, data, total)
        times.append(time.thread_time() - start)
    return min(times)
