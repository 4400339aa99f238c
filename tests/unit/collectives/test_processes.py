"""Programs that ranks start: which signals end them."""

import os
import signal
import subprocess
import sys

from collectives.processes import helpers_start

PROGRAM = """
import numpy  # it starts threads
import time
from collectives.processes import end_by_parent_alone
end_by_parent_alone()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_signal_to_the_whole_step_does_not_end_a_helper_of_a_rank() -> None:
    """Slurm asks ranks to stop by signals to all processes of a step."""
    with helpers_start():
        helper = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
    with helper:
        assert helper.stdout is not None and helper.stdout.readline() == b"ready\n"
        for name in ("USR1", "USR2", "TERM", "TERM"):
            subprocess.run(["kill", "-s", name, str(helper.pid)], check=True)  # by another process than the parent
        try:
            assert _waits(helper), "it has ended"
        finally:
            os.kill(helper.pid, signal.SIGTERM)
        assert helper.wait(10) == 128 + signal.SIGTERM


def _waits(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        return True
    return False
