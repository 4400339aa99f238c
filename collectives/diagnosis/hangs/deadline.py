"""The deadline: how long an operation may wait, and the end of a process that nothing else has ended by then."""

import math
import os
import threading
import time

from collectives.diagnosis import dump, goodbye, record
from collectives.environment import checked_seconds, seconds_of

DEFAULT_DEADLINE_S = 600.0
EXIT_CODE = 124  # of a job that a deadline ends: the one of timeout(1)

# After the deadline a process just ends: neither its own monitor nor another has brought a report out.
_LAST_RESORT_S = 30.0
_POLL_S = 0.5
_PAUSE_S = 5.0  # a longer gap between two looks: the process was stopped, and time in operations counts from its end


class Deadline:
    """The deadline of this process in seconds, 0 for no deadline: set by `world()`, then also by `set_deadline`. None before."""

    seconds: float | None = None


def from_environment() -> float:
    """MPITRAIN_DEADLINE_S in seconds, 0 for no deadline. ValueError unless it is a number of at least 0."""
    return seconds_of("MPITRAIN_DEADLINE_S", DEFAULT_DEADLINE_S, "no deadline")


def set_deadline(seconds: float) -> None:
    """End the job with a report when an operation of this rank waits longer than this. 0: never. Call it alike on all ranks.

    The default is 600, or MPITRAIN_DEADLINE_S. It counts from the entry into each operation, so ranks may compute as long as they
    like while none of the others waits for them. ValueError for other numbers, RuntimeError before `world()`.
    """
    if Deadline.seconds is None:
        raise RuntimeError("set_deadline: call collectives.world() first")
    try:
        Deadline.seconds = checked_seconds(seconds)
    except ValueError as error:
        raise ValueError(f"deadline {error}, or 0 for no deadline") from None


class Clock:
    """Time as a thread sees it that looks often: a long gap means that the process was stopped, and does not count."""

    def __init__(self) -> None:
        self.now = self.awake_since = time.monotonic()

    def look(self) -> float:
        """Take note of the time, and return it."""
        last, self.now = self.now, time.monotonic()
        if self.now - last > _PAUSE_S:
            self.awake_since = self.now
        return self.now

    def limit(self, waited_s: float) -> float:
        """An operation that began before this time has waited so long; minus infinity if the process was stopped meanwhile."""
        begun_before = self.now - waited_s
        return begun_before if self.awake_since < begun_before else -math.inf

    def waits(self, longer_than_s: float) -> list[record.Operation]:
        """The operations that have waited longer than this, oldest first."""
        limit = self.limit(longer_than_s)
        return record.open_operations(begun_before=limit) if limit > -math.inf else []

    def late(self, grace_s: float) -> record.Operation | None:
        """An operation that has waited for the deadline and so much longer."""
        return next(iter(self.waits(Deadline.seconds + grace_s)), None) if Deadline.seconds else None


def last_resort(stop: threading.Event) -> None:
    """The program of a thread that uses no MPI, which may be stuck, and the monitor with it. Ends when `stop` is set.

    Long after the deadline it ends the process, and thereby the launcher the job.
    """
    clock = Clock()
    while not stop.wait(_POLL_S):
        clock.look()
        if clock.late(_LAST_RESORT_S) is not None:
            dump.dump(
                f"no report within {_LAST_RESORT_S:g} s of the deadline, so MPI or the other ranks are stuck; this process ends"
            )
            goodbye.say()
            os._exit(EXIT_CODE)
