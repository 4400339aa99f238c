"""Where the time of a step goes: the thread that trains is in one place at a time, and each mark ends one place and begins another.

A place is a layer with a kind of work. The time between two layers belongs to the one that follows, because it prepares it: a unit's
parameters are gathered. On CPUs a mark takes the time of the host, and the seconds of communication so
far. On a GPU it records an event on the stream that computes, and communication on other streams cannot be told from computing.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from mpitrain.tools.profile.places import GRADIENTS, OTHER, PASSES, STAGES, Place, PlaceTimes


class Communicated(NamedTuple):
    """Seconds that this rank has spent in communication so far, with the waits for other ranks."""

    of_layers: float
    """Gathers, reductions, exchanges of tensor parallelism, sums over the ranks."""
    of_stages: float
    """Messages between the stages of a pipeline."""


class Instant(Protocol):
    """A moment."""

    def since(self, earlier: "Instant") -> float:
        """Seconds from an earlier moment to this one."""


class _HostInstant(NamedTuple):
    at: float

    def since(self, earlier: Instant) -> float:
        assert isinstance(earlier, _HostInstant)
        return self.at - earlier.at


class _GpuInstant(NamedTuple):
    event: torch.cuda.Event

    def since(self, earlier: Instant) -> float:
        assert isinstance(earlier, _GpuInstant)
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


def instants(device: torch.device) -> Callable[[], Instant]:
    """What tells the moment on a device."""
    if device.type != "cuda":
        return lambda: _HostInstant(time.perf_counter())

    def recorded() -> Instant:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _GpuInstant(event)

    return recorded


class _Mark(NamedTuple):
    """Where a place ended."""

    place: Place
    at: Instant
    communicated: Communicated


class PlaceClock:
    """The places of one step after the other."""

    def __init__(self, now: Callable[[], Instant], communicated: Callable[[], Communicated]) -> None:
        self._now, self._communicated = now, communicated
        self._marks: list[_Mark] = []
        self._within: list[Place] = [OTHER]

    def begin(self) -> None:
        """A step begins."""
        self._marks = [_Mark(OTHER, self._now(), self._communicated())]
        self._within = [OTHER]

    def enter(self, name: str, kind: str = "") -> None:
        """A place begins, within the present one. The time between the layers of PASSES belongs to the layers."""
        self._end((name, kind) if self._within[-1] == PASSES and not self._ends_backward(kind) else self._within[-1])
        self._within.append((name, kind))

    def leave(self, name: str, kind: str = "") -> None:
        """The present place ends."""
        self._end((name, kind))
        self._within.pop()

    def end(self) -> PlaceTimes:
        """The step ends."""
        self._end(OTHER)
        times = PlaceTimes(defaultdict(float), defaultdict(float))
        for earlier, mark in zip(self._marks, self._marks[1:], strict=False):
            of_layers, of_stages = (
                now - before for now, before in zip(mark.communicated, earlier.communicated, strict=True)
            )
            place = GRADIENTS if mark.place == PASSES else mark.place
            times.communicated[place] += of_layers
            times.communicated[STAGES] += of_stages
            times.computed[place] += mark.at.since(earlier.at) - of_layers - of_stages
        return times

    def _ends_backward(self, kind: str) -> bool:
        """Whether a forward follows a backward: the end of the reductions is between them."""
        return kind == "forward" and self._marks[-1].place[1] == "backward"

    def _end(self, place: Place) -> None:
        self._marks.append(_Mark(place, self._now(), self._communicated()))
