"""The notice: a few lines about a long wait, long before the deadline ends the job. long_wait.py writes them.

A notice is due when a wait has lasted MPITRAIN_NOTICE_S (30 s), and again when it has lasted twice as long as at the last one, so
that a slow rank does not cause many. The monitor then asks all ranks. A notice covers the waits of all ranks, so only one prints it.
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
    """A wait for which a notice is due."""

    number: int  # of its operation; for work on a device a negative number
    begun: float


class DeviceWork(NamedTuple):
    """Work of NCCL on the device. No operation in the record shows the host's wait for it."""

    what: str
    since: float  # on `time.monotonic`


_on_devices: dict[int, DeviceWork] = {}  # by the id of its queue


def note_device(queue: int, device: DeviceWork | None) -> None:
    """Note the unfinished work of the queue with the id `queue`; None if it has none."""
    if device is not None:
        _on_devices[queue] = device
    else:
        _on_devices.pop(queue, None)


def on_device() -> DeviceWork | None:
    """The oldest unfinished work on a device of this process."""
    return min(_on_devices.copy().values(), key=lambda device: device.since, default=None)


class Notices:
    """The waits of this process for which a notice is due."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the age of a wait at its first notice; 0: no notices."""
        self._seconds = seconds
        self._due: dict[Wait, float] = {}  # the age at the next notice, for waits that have had one

    def due(self, clock: Clock, grace_s: float) -> Wait | None:
        """A wait for which a notice has been due for `grace_s`. None if the deadline, which reports the same, comes before."""
        if not self._seconds or 0 < (Deadline.seconds or 0) <= self._seconds:
            return None
        for wait in self._waits(clock.waits(self._seconds + grace_s)):
            if clock.now - wait.begun >= self._due.get(wait, self._seconds) + grace_s:
                return wait
        return None

    def told(self, age_s: float) -> None:
        """Note a notice for all ranks about a wait of age `age_s`. The next one for this rank's waits is due after that time again."""
        now = time.monotonic()
        self._due = {wait: now - wait.begun + age_s for wait in self._waits(record.open_operations())}

    def goes_on(self, wait: Wait) -> bool:
        """Whether this rank is still in the wait."""
        return wait in self._waits(record.open_operations())

    def _waits(self, operations: list[record.Operation]) -> list[Wait]:
        on_devices = [Wait(-queue, device.since) for queue, device in _on_devices.copy().items()]
        return [*(Wait(each.number, each.begun) for each in operations), *on_devices]
