"""For all tests: the level of a run, a watchdog over each test, tests that need a GPU, and the command that runs one test again.

A test that takes longer than `DEFAULT_TIMEOUT_S` (`@pytest.mark.timeout_s(n)` sets another) prints the stacks of all
threads, prefixed with the rank under MPI, and ends the whole run (under MPI the job) with a non-zero exit code: a test
that hangs inside a collective cannot be interrupted and skipped.
"""

import faulthandler
import gc
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest
from extent import LEVEL

DEFAULT_TIMEOUT_S = 120.0
# After its own report a rank waits so long for the others' before it ends the job.
REPORT_GRACE_S = 2.0
# Then this, if not even a thread of ours gets to run (something holds the GIL).
LAST_RESORT_S = 10.0


def rank_prefix() -> str:
    """ "[rank 3] " under MPI, "" otherwise. Never starts MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1:
        return ""
    return f"[rank {mpi.COMM_WORLD.rank}] "


def again(test: str) -> str:
    """The command that runs one test alone in the way in which it ran now."""
    mpi = sys.modules.get("mpi4py.MPI")
    ranks = mpi.COMM_WORLD.size if test.startswith("tests/mpi/") and mpi is not None else None
    return f"again: {f'MPITRAIN_TEST_NP={ranks} ' if ranks else ''}./mpirun/test {shlex.quote(test)}"


class Watchdog:
    """Ends the process, and the MPI job it belongs to, if it is not stopped in time."""

    def __init__(self) -> None:
        # pytest captures file descriptor 2 while a test runs; a copy made before goes to the real one
        self._stderr = os.dup(2)
        self._timer: threading.Timer | None = None

    def start(self, test: str, timeout_s: float) -> None:
        self._timer = threading.Timer(timeout_s, self._end, [test, timeout_s])
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(timeout_s + LAST_RESORT_S, exit=True, file=self._stderr)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()

    def report(self, headline: str) -> None:
        """Write `headline` and the stacks of all threads to the real stderr, in one piece."""
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            stacks.seek(0)
            lines = [headline, *stacks.read().splitlines()]
        os.write(self._stderr, "".join(f"{rank_prefix()}{line}\n" for line in lines).encode())

    def end_job(self) -> None:
        """End this process and all ranks of its job, at once."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(1)
        os._exit(1)

    def _end(self, test: str, timeout_s: float) -> None:
        self.report(f"watchdog: {test} has not ended after {timeout_s:g} s; {again(test)}; all threads:")
        # the other ranks hang in the same test and are about to report it too
        time.sleep(REPORT_GRACE_S)
        self.end_job()


watchdog_key = pytest.StashKey[Watchdog]()


def pytest_configure(config: pytest.Config) -> None:
    # What the user has measured is not to decide what the tests run: this folder holds the compiled codec alone.
    os.environ["MPITRAIN_CACHE_DIR"] = os.path.join(os.path.dirname(__file__), "cache")
    config.stash[watchdog_key] = Watchdog()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LEVEL != "all":
        left_out = [item for item in items if (item.get_closest_marker("rest") is None) != (LEVEL == "core")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if (item.get_closest_marker("rest") is None) == (LEVEL == "core")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    for test in dict.fromkeys(report.nodeid for report in failed):
        terminalreporter.write_line(again(test))


def pytest_collection_finish() -> None:
    # What the test files have imported, a million objects with torch and JAX, stays to the end: a full collection need not visit it.
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    watchdog = item.config.stash[watchdog_key]
    marker = item.get_closest_marker("timeout_s")
    watchdog.start(item.nodeid, marker.args[0] if marker else DEFAULT_TIMEOUT_S)
    try:
        return (yield)
    finally:
        watchdog.stop()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
