"""A rank that stands still inside JAX before an operation begins: the one wait of a job that the flight record does not show.

JAX carries a jitted operation out when its operand is there. Where that never comes, as after a callback that waits for work of its own
thread, no rank enters an operation, and none would pass the deadline. Seen from outside: a thread is inside a call of JAX, and the
process uses no processor time. A computation, however long, uses some.
"""

import time

from collectives.diagnosis import stacks
from collectives.diagnosis.record import BEGUN, Log, Operation

_IDLE_SHARE = 0.01  # of a core: the threads that watch take a tenth of that
_IDLE_S = 0.02


class Standstill:
    """The standstill of this process. Only the CPU's JAX is watched: the host is idle while a GPU computes."""

    log: Log | None = None  # None: this process uses no jitted collectives

    def __init__(self) -> None:
        self._begin(time.monotonic())

    @classmethod
    def watch(cls, rank: int) -> None:
        """From now on. `rank`: this one, in the whole job."""
        if cls.log is None:
            cls.log = Log([rank], "JAX")

    def late(self, now: float, begun_before: float) -> Operation | None:
        """The wait, as an operation without a number, if it has lasted since before `begun_before`. To be asked again and again."""
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
