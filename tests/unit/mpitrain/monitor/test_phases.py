"""The clocks of a step."""

import os
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from mpitrain.job.record.gauges.phases import CpuClock, Lap, StepClock
from mpitrain.job.train.passes import DeviceShares


def test_a_step_is_divided_and_communication_counts_once() -> None:
    spent = 0.0
    clock = StepClock(lambda: spent)
    heard: list[Lap] = []
    clock.on_lap = heard.append
    clock.begin()
    time.sleep(0.01)
    clock.lap("data")
    for phase in ("forward", "backward", "forward", "backward"):
        time.sleep(0.01)
        spent += 0.004 if phase == "backward" else 0.0
        clock.lap(phase)
    seconds = clock.seconds
    assert clock.comm_s == pytest.approx(0.008)
    assert seconds["data"] >= 0.01 and seconds["forward"] >= 0.02 and seconds["backward"] >= 0.011
    assert sum(seconds.values()) + clock.comm_s == pytest.approx(clock.step_s, abs=8e-3), (
        "no phase of 10 ms is missing; the machine may pause"
    )
    assert [lap.phase for lap in heard] == ["data", "forward", "backward", "forward", "backward"]
    assert all(one.ended == other.begun for one, other in pairwise(heard))
    clock.move(0.001, "backward", "forward")
    assert clock.seconds["forward"] == pytest.approx(seconds["forward"])
    clock.begin()
    assert clock.comm_s == 0.0 and not any(clock.seconds.values())


class Event:
    """As a device's event: it has a time only when the work before it is done."""

    done_s = iter([0.0, 1.0, 4.0, 5.0, 8.0])

    def record(self) -> None:
        self.at = next(self.done_s)

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


def test_the_share_of_forwards_by_a_device_s_clock() -> None:
    shares = DeviceShares(Event)
    for _ in range(5):  # a beginning, and two forwards and backwards in turns
        shares.mark()
    assert shares.forward() == pytest.approx(2 / 8)


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="the kernel has no /proc/.../schedstat")
def test_a_thread_that_shares_its_core_has_a_run_delay() -> None:
    """Two threads of this process take turns by the interpreter's lock; so another process is needed for a delay."""
    core = {min(os.sched_getaffinity(0))}
    busy = f"import os\nos.sched_setaffinity(0, {core})\nprint(flush=True)\nwhile os.getppid() == {os.getpid()}: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
    assert neighbour.stdout is not None
    neighbour.stdout.readline()
    read: list[tuple[float, float, float]] = []

    def work() -> None:
        os.sched_setaffinity(0, core)  # of this thread alone
        clock = CpuClock()
        clock.begin()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        took = clock.read()
        read.append((*took, time.monotonic() - end + 0.3))
        clock.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    neighbour.kill()
    neighbour.communicate()
    ((cpu_s, delay_s, wall_s),) = read
    assert delay_s > 0.05 and 0 < cpu_s < 0.9 * wall_s
    assert cpu_s + delay_s == pytest.approx(wall_s, rel=0.2)
