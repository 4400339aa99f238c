"""What other processes of the machine do while a test judges times or causes. Such a test widens its bounds by it."""

import os
import time
from pathlib import Path


class OtherLoad:
    """Measures from its making on how many cores processes other than this one and its children have used."""

    def __init__(self) -> None:
        self._began, self._busy_s, self._own_s = time.perf_counter(), busy_s(), own_s()

    def own_s(self) -> float:
        """The CPU time of this process, and of those of its children that have ended. Under MPI add up that of the host's ranks."""
        return own_s() - self._own_s

    def cores(self, own_s: float | None = None) -> float:
        """The mean number of cores that others have used. `own_s`: the CPU time of the test's processes; None: see above."""
        others_s = busy_s() - self._busy_s - (self.own_s() if own_s is None else own_s)
        return max(others_s / (time.perf_counter() - self._began), 0.0)


def busy_s() -> float:
    """The CPU time of all processes since the start of the machine."""
    user, nice, system, _, _, *interrupts_and_steal = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts_and_steal))) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    return sum(os.times()[:4])
