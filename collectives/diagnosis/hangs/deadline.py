"""The deadline: the longest wait of an operation or inside JAX, and a thread that ends the process if the monitor does not."""

import math
import threading
import time

from collectives.diagnosis import dump, record, stacks
from collectives.diagnosis.ending import end_process
from collectives.diagnosis.failure import write_failure
from collectives.diagnosis.ring import goodbye
from collectives.environment import checked_seconds, seconds_of

DEFAULT_DEADLINE_S = 600.0
EXIT_CODE = 124  # of a job that a deadline ends, as of timeout(1)

_LAST_RESORT_S = 30.0  # after the deadline: the process ends if no monitor has ended the job
_POLL_S = 0.5
_PAUSE_S = 5.0  # after a longer gap between two looks the process was stopped; waits then count from the end of the gap

_IDLE_SHARE = 0.01  # of a core; the monitor's threads use a tenth of this
_IDLE_S = 0.02


class Deadline:
    """The deadline of this process in seconds, 0 for no deadline. None until `world()` sets it; `set_deadline` changes it."""

    seconds: float | None = None


def from_environment() -> float:
    """MPITRAIN_DEADLINE_S in seconds, 0 for no deadline. ValueError unless it is a number of at least 0."""
    return seconds_of("MPITRAIN_DEADLINE_S", DEFAULT_DEADLINE_S, "no deadline")


def set_deadline(seconds: float) -> None:
    """End the job with a report when an operation of this rank waits longer than `seconds`; 0: never. Pass the same on all ranks.

    The default is MPITRAIN_DEADLINE_S, else 600. The time counts from the entry into each operation, so a rank may compute for any
    time while no other rank waits for it. ValueError for negative or other numbers, RuntimeError before `world()`.
    """
    if Deadline.seconds is None:
        raise RuntimeError("set_deadline: call collectives.world() first")
    try:
        Deadline.seconds = checked_seconds(seconds)
    except ValueError as error:
        raise ValueError(f"deadline {error}, or 0 for no deadline") from None


class Clock:
    """The time for a thread that looks often. A long gap between two looks means that the process was stopped, and does not count."""

    def __init__(self) -> None:
        self.now = self.awake_since = time.monotonic()
        self._stopped_s = 0.0

    def look(self) -> float:
        """Update the time, and return it."""
        last, self.now = self.now, time.monotonic()
        if self.now - last > _PAUSE_S:
            self.awake_since = self.now
            self._stopped_s += self.now - last
        return self.now

    def look_awake(self) -> float:
        """Update the time, and return the time of a clock that stands still while the process is stopped."""
        return self.look() - self._stopped_s

    def limit(self, waited_s: float) -> float:
        """The time before which an operation has begun that has waited `waited_s`; minus infinity if the process was stopped since."""
        begun_before = self.now - waited_s
        return begun_before if self.awake_since < begun_before else -math.inf

    def waits(self, longer_than_s: float) -> list[record.Operation]:
        """The operations that have waited longer than `longer_than_s`, oldest first."""
        limit = self.limit(longer_than_s)
        return record.open_operations(begun_before=limit) if limit > -math.inf else []

    def late(self, grace_s: float) -> record.Operation | None:
        """An operation that has passed the deadline by `grace_s`."""
        return next(iter(self.waits(Deadline.seconds + grace_s)), None) if Deadline.seconds else None


class Standstill:
    """The standstill of this process inside JAX before an operation begins, a wait that the flight record does not show.

    JAX carries out a jitted operation when its operand has been computed. If the operand never comes, as after a callback that waits
    for work of its own thread, no rank enters an operation, and no operation passes the deadline. The sign of a standstill: a thread
    is inside a call of JAX, and the process uses no processor time. A computation, however long, uses processor time. Only JAX on CPUs
    is watched, because the host is idle while a GPU computes.
    """

    log: record.Log | None = None  # None: this process uses no jitted collectives

    def __init__(self) -> None:
        self._begin(time.monotonic())

    @classmethod
    def watch(cls, rank: int) -> None:
        """Begin to watch. `rank`: this rank's number in the job."""
        if cls.log is None:
            cls.log = record.Log([rank], "JAX")

    def late(self, now: float, begun_before: float) -> record.Operation | None:
        """The standstill as an operation with sequence 0, if it began before `begun_before`. The monitor calls this repeatedly."""
        if self.log is None:
            return None
        used_s = time.process_time() - self._used_s
        if used_s > _IDLE_S + _IDLE_SHARE * (now - self._since) or not stacks.any_inside("jax"):
            self._begin(now)
            return None
        if self._since >= begun_before:
            return None
        name, main = "standing still before an operation begins", stacks.main_thread()
        return record.Operation(-1, self.log, 0, name, 0, "", None, None, "", record.BEGUN, main, self._since, 0.0)

    def _begin(self, now: float) -> None:
        self._since, self._used_s = now, time.process_time()


def last_resort(stop: threading.Event) -> None:
    """The function of a thread that does not use MPI, because MPI, and with it the monitor, may be stuck. Returns when `stop` is set.

    Long after the deadline it ends the process; then the launcher ends the job.
    """
    clock = Clock()
    while not stop.wait(_POLL_S):
        clock.look()
        if clock.late(_LAST_RESORT_S) is not None:
            why = f"no report within {_LAST_RESORT_S:g} s of the deadline, so MPI or the other ranks are stuck; this process ends"
            dump.dump(why)
            write_failure(dump.text(why, dump.NUM_SHOWN))
            goodbye.say(goodbye.End.ABORT)
            end_process(EXIT_CODE)
