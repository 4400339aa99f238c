"""The notice: one line about a wait that lasts, long before the deadline ends the job. report.py writes the line.

A wait is due when it has lasted MPITRAIN_NOTICE_S (30 s), and again whenever it has lasted twice as long as at the last line about
it: a rank that is merely slow is no flood of lines. The monitor asks all ranks then; a line is about the waits of all ranks that were
asked, so one rank prints it.
"""

import time
from typing import NamedTuple

from collectives.diagnosis import record
from collectives.diagnosis.hangs.deadline import Clock, Deadline
from collectives.environment import seconds_of

DEFAULT_NOTICE_S = 30.0


def from_environment() -> float:
    """MPITRAIN_NOTICE_S in seconds, 0 for no notices. ValueError unless it is a number of at least 0."""
    return seconds_of("MPITRAIN_NOTICE_S", DEFAULT_NOTICE_S, "no notices")


class Wait(NamedTuple):
    """A wait for which a line is due."""

    number: int  # of its operation; of what is on a device, a number below 0
    begun: float


class DeviceWork(NamedTuple):
    """Work of NCCL on the device for which the host waits in no operation of the record."""

    what: str
    since: float  # on `time.monotonic`


_on_devices: dict[int, DeviceWork] = {}  # by the id of its queue


def note_device(queue: int, device: DeviceWork | None) -> None:
    """Note the unfinished work of the queue of that id; None: it has none."""
    if device is not None:
        _on_devices[queue] = device
    else:
        _on_devices.pop(queue, None)


def on_device() -> DeviceWork | None:
    """The work that has been on a device of this process for longest."""
    return min(_on_devices.copy().values(), key=lambda device: device.since, default=None)


class Notices:
    """The waits of this process for which a line is due."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: after which the first line is due; 0: never."""
        self._seconds = seconds
        self._due: dict[Wait, float] = {}  # after how many seconds the next line is, for those that one has been about

    def due(self, clock: Clock, grace_s: float) -> Wait | None:
        """A wait for which a line has been due for `grace_s`. None from the deadline on, which tells the same and ends the job."""
        if not self._seconds or 0 < (Deadline.seconds or 0) <= self._seconds:
            return None
        for wait in self._waits(clock.waits(self._seconds + grace_s)):
            if clock.now - wait.begun >= self._due.get(wait, self._seconds) + grace_s:
                return wait
        return None

    def told(self, age_s: float) -> None:
        """A line about all ranks tells of a wait of `age_s`: for this rank's waits the next is due when that one is twice as old."""
        now = time.monotonic()
        self._due = {wait: now - wait.begun + age_s for wait in self._waits(record.open_operations())}

    def goes_on(self, wait: Wait) -> bool:
        """Whether this rank is still in it."""
        return wait in self._waits(record.open_operations())

    def _waits(self, operations: list[record.Operation]) -> list[Wait]:
        on_devices = [Wait(-queue, device.since) for queue, device in _on_devices.copy().items()]
        return [*(Wait(each.number, each.begun) for each in operations), *on_devices]
