"""The speed of the codec of links: every implementation and format, in turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.console import RenderableType

from collectives.bench.kit.launches import Launch
from collectives.bench.kit.turns import Seconds, slowest, take_turns, timed
from collectives.codec.choice import available
from collectives.codec.formats import FORMATS, Codec, Format
from collectives.communicator.communicator import Communicator
from collectives.selection.wire import load_codec
from collectives.shared.tables import new_table
from collectives.texts import show_bytes

LINK_BYTES_PER_S = 125e6  # 1 Gbit/s, the link for which the saved time is computed
WARM_UP, LEAST_ROUNDS = 1, 5


@dataclass(frozen=True)
class CodecMeasurement:
    """One implementation and format. `nbytes`: of the float32 elements. `seconds`: medians over rounds of the slowest rank's time."""

    format: str
    implementation: str
    nbytes: int
    encoded_nbytes: int
    seconds: dict[str, float]  # of "encode", "decode" and "decode_add"
    rounds: int

    @property
    def share_of_saved_time(self) -> float | None:
        """The time to encode and to decode and add, divided by what it saves on a link of 1 Gbit/s; None if it saves nothing."""
        saved = (self.nbytes - self.encoded_nbytes) / LINK_BYTES_PER_S
        return (self.seconds["encode"] + self.seconds["decode_add"]) / saved if saved else None


@dataclass(frozen=True)
class CodecLaunch(Launch):
    """The figures of one job in which all ranks code at the same time."""

    FORMAT = 1
    COMMAND = "python -m collectives bench --codec --json"
    ALIKE = ("machine", "ranks", "nodes")

    results: Sequence[CodecMeasurement] = ()


class _Coder(NamedTuple):
    """A contestant (see kit/turns.py)."""

    comm: Communicator
    codec: Codec
    format: Format
    x: np.ndarray
    data: np.ndarray
    total: np.ndarray

    def turn(self, round_: int) -> Seconds:
        actions: dict[str, Callable[[], None]] = {
            "encode": lambda: self.codec.encode(self.format, self.x, self.data),
            "decode": lambda: self.codec.decode(self.format, self.data, self.total),
            "decode_add": lambda: self.codec.decode_add(self.format, self.data, self.total),
        }
        return {name: timed(self.comm, action) for name, action in actions.items()}


def measure(comm: Communicator, nbytes: int, rounds: int, seconds: float) -> list[CodecMeasurement]:
    """Time all implementations that run on all ranks, at `nbytes` of float32, for about `seconds` for each of them. Collective."""
    load_codec(comm.node)
    codecs = available().codecs
    everywhere = set.intersection(*(set(names) for names in comm.all_gather_object(list(codecs))))
    x = np.random.default_rng(comm.rank).standard_normal(max(1, nbytes // 4), dtype=np.float32)
    total = np.zeros_like(x)
    data = {fmt: np.zeros(fmt.nbytes(x.size), np.uint8) for fmt in FORMATS.values()}
    coders = {
        (fmt, name): _Coder(comm, codec, fmt, x, data[fmt], total)
        for fmt in FORMATS.values()
        for name, codec in codecs.items()
        if name in everywhere and not (fmt.is_exact and name != "numpy")  # a copy, for all of them
    }
    warm = slowest(comm, take_turns(coders, rounds=1, warm_up=WARM_UP))
    a_round = float(sum(taken[0] for taken in warm.values()))
    num = max(LEAST_ROUNDS, min(rounds, int(seconds * len(coders) / a_round)))
    series = slowest(comm, take_turns(coders, rounds=num))
    found = []
    for fmt, name in coders:
        medians = {action: float(np.median(taken)) for (key, action), taken in series.items() if key == (fmt, name)}
        found.append(CodecMeasurement(fmt.name, name, x.nbytes, fmt.nbytes(x.size), medians, num))
    return found


def tables(launches: Sequence[CodecLaunch]) -> Iterator[RenderableType]:
    """For each launch and size a table."""
    for launch in launches:
        for nbytes in dict.fromkeys(row.nbytes for row in launch.results):
            title = f"codec, {show_bytes(nbytes)} of float32, {launch.ranks_on_nodes}"
            caption = "GB/s of float32; of saved: time to encode, decode and add / time saved at 1 Gbit/s"
            shown = new_table(
                ("format", "code", "bytes", "encode", "decode", "decode, add", "of saved"),
                title=title,
                left=2,
                caption=caption,
            )
            for row in (row for row in launch.results if row.nbytes == nbytes):
                shown.add_row(
                    row.format,
                    row.implementation,
                    f"{row.encoded_nbytes / nbytes:.3f}",
                    *(f"{nbytes / seconds / 1e9:.1f}" for seconds in row.seconds.values()),
                    "" if row.share_of_saved_time is None else f"{row.share_of_saved_time:.3f}",
                )
            yield shown
