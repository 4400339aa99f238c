"""The clocks of the hosts: each host's time on rank 0's clock, by messages there and back.

All processes of a host read one monotonic clock, so their offset is 0. One rank of each other host exchanges messages with rank 0
(Cristian 1989): the answer shows rank 0's time at a moment between the two times of the asking rank, so the error is at most half the
round trip. Of each round of messages the shortest trip counts. A line through these samples gives the offset and the rate.
"""

import socket
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collectives import Communicator

NUM_TRIPS = 20
"""Round trips of one host in a round."""
EVERY_S = 1.0
"""Seconds between two rounds."""
TAG = 32_000


class Sample(NamedTuple):
    """Another clock was `offset` seconds ahead of this one at the time `at` of this one, give or take `error`."""

    at: float
    offset: float
    error: float


class Line(NamedTuple):
    """From a clock to another one: `offset` seconds at the time `at`, which grow by `rate` a second."""

    at: float = 0.0
    offset: float = 0.0
    rate: float = 0.0
    error: float = 0.0
    """The bound of the best sample in seconds; 0 for the same clock."""

    def __call__(self, time_s: Any) -> Any:
        """The other clock at a time of this one, or at an array of times."""
        return time_s + self.offset + self.rate * (time_s - self.at)


def fit(samples: Sequence[Sample]) -> Line:
    """The line through the samples, by least squares with weights 1 / error.

    The error of a sample is bounded, so the weights make the fit robust: a sample that is far off has a long round trip, and so a small
    weight. A single sample gives no rate. No sample: the same clock.
    """
    if not samples:
        return Line()
    at, offset, error = np.array(samples, np.float64).T
    error = np.maximum(error, 1e-9)
    middle = float(at.mean())
    if np.ptp(at) == 0:
        best = int(error.argmin())
        return Line(middle, float(offset[best]), 0.0, float(error[best]))
    base = float(
        offset[0]
    )  # the differences alone, since an offset may have more digits than a float64 shows of their squares
    rate, there = np.polyfit(at - middle, offset - base, 1, w=1 / error)
    return Line(middle, base + float(there), float(rate), float(error.min()))


def this_host() -> tuple[str, str]:
    """What processes with one monotonic clock have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return socket.gethostname(), boot


class Clocks:
    """Samples of rank 0's clock on the first rank of each other host. All methods but `read` are collective."""

    def __init__(
        self, comm: "Communicator", read: Callable[[float], float] | None = None, host: Hashable | None = None
    ) -> None:
        """`read`: what this host's clock shows at a time of `time.monotonic`; None: the same. A test passes one that is wrong.

        `host`: equal on all ranks that have one clock; None: the name of the host, and its boot.
        """
        self.comm, self.read = comm, read or _same
        hosts = comm.all_gather_object(this_host() if host is None else host)
        self.host_of = [hosts.index(each) for each in hosts]
        """The number of each rank's host: its first rank."""
        self._others = sorted(set(self.host_of) - {0})
        self.samples: list[Sample] = []
        self._last = -float("inf")

    def measure(self, *, always: bool = True) -> None:
        """A round of messages with each other host. Not `always`: if the last round is `EVERY_S` old on rank 0."""
        comm, now = self.comm, time.monotonic()
        if comm.rank == 0 and self._others:
            num = NUM_TRIPS if always or now - self._last >= EVERY_S else 0
            self._last = now if num else self._last
            for other in self._others:
                comm.send(np.array([num]), other, TAG)
            if num:
                for other in self._others:
                    self._answer(other)
        elif comm.rank in self._others:
            num_trips = np.empty(1, np.int64)
            comm.recv(num_trips, 0, TAG)
            if num_trips[0]:
                self.samples.append(min((self._ask() for _ in range(int(num_trips[0]))), key=lambda each: each.error))

    def _answer(self, other: int) -> None:
        asked = np.empty(1)
        for _ in range(NUM_TRIPS):
            self.comm.recv(asked, other, TAG)
            self.comm.send(np.array([self.read(time.monotonic())]), other, TAG)

    def _ask(self) -> Sample:
        answer = np.zeros(1)
        sent = self.read(time.monotonic())
        self.comm.send(answer, 0, TAG)
        self.comm.recv(answer, 0, TAG)
        came = self.read(time.monotonic())
        return Sample((sent + came) / 2, float(answer[0]) - (sent + came) / 2, (came - sent) / 2)

    def line(self) -> Line:
        """From this rank's clock to rank 0's."""
        if not self._others:
            return Line()
        of_ranks = self.comm.all_gather_object(self.samples)
        return fit(of_ranks[self.host_of[self.comm.rank]])


def _same(time_s: float) -> float:
    return time_s
