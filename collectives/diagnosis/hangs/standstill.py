"""Detects a standstill inside JAX before an operation begins, the only wait of a job that the flight record does not show.

JAX carries out a jitted operation when its operand has been computed. If the operand never comes, as after a callback that waits for
work of its own thread, no rank enters an operation, and no operation passes the deadline. The sign of a standstill: a thread is inside
a call of JAX, and the process uses no processor time. A computation, however long, uses processor time.
"""

import time

from collectives.diagnosis import stacks
from collectives.diagnosis.record import BEGUN, Log, Operation

_IDLE_SHARE = 0.01  # of a core; the monitor's threads use a tenth of this
_IDLE_S = 0.02


class Standstill:
    """The standstill of this process. Only JAX on CPUs is watched, because the host is idle while a GPU computes."""

    log: Log | None = None  # None: this process uses no jitted collectives

    def __init__(self) -> None:
        self._begin(time.monotonic())

    @classmethod
    def watch(cls, rank: int) -> None:
        """Begin to watch. `rank`: this rank's number in the job."""
        if cls.log is None:
            cls.log = Log([rank], "JAX")

    def late(self, now: float, begun_before: float) -> Operation | None:
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
        return Operation(-1, self.log, 0, name, 0, "", None, None, "", BEGUN, main, self._since, 0.0)

    def _begin(self, now: float) -> None:
        self._since, self._used_s = now, time.process_time()
