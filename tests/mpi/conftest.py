"""The same test files on 1 to 4 ranks: `mpirun -np N python -m pytest tests/mpi`. Every rank runs every test.

After each phase of a test (set-up, call, tear-down) the ranks compare how it went, through a communicator of their own.
A test that failed on one rank has then failed on all, with that rank's traceback in rank 0's report, which is the only
one printed. A rank that failed while others wait for it inside a collective reports and ends the job after
`STRANDED_S`; a rank that never comes is the watchdog's case (tests/conftest.py).

Tests use the fixtures `comm` and `shared_tmp`. All ranks must come to the same outcome: also to skip.
"""

import functools
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extent import FULL
from hypothesis import settings
from mpi4py import MPI

# property tests draw the same examples on every rank
settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
settings.load_profile("ranks")

# A folder of its own for each rank's temporary ones: at the end of a session pytest removes dead ones, and ranks that do so in
# the same place at the same time trip over each other.
_TEMP_ROOT = Path(tempfile.gettempdir(), f"mpitrain-tests-{os.getuid()}", f"rank-{MPI.COMM_WORLD.rank}")
_TEMP_ROOT.mkdir(parents=True, exist_ok=True)
os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_TEMP_ROOT)

# How long a rank whose test failed waits for the others to end theirs.
STRANDED_S = float(os.environ.get("MPITRAIN_TEST_STRANDED_S", "10"))

OUTCOMES = ["passed", "skipped", "failed"]


class Ranks:
    """Agreement between the ranks of a test run."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.collected = False

    def gather(self, value: int, timeout_s: float | None = None) -> list[int] | None:
        """Every rank's `value`; None if some have not come after `timeout_s` seconds."""
        values = np.empty(self.comm.size, np.int64)
        request = self.comm.Iallgather(np.array([value], np.int64), values)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 0.0
        while not request.Test():
            if deadline is not None and time.monotonic() > deadline:
                return None
            # first only give the core away: on more ranks than cores the others need it
            time.sleep(pause_s)
            pause_s = min(pause_s + 1e-4, 1e-2)
        return values.tolist()


ranks_key = pytest.StashKey[Ranks]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    ranks = config.stash[ranks_key] = Ranks()
    if ranks.comm.rank > 0:
        # A reporter that nobody reads. Not none: assertions are explained through it.
        config.pluginmanager.unregister(name="terminalreporter")
        # never closed: pytest writes to it until the very end
        nowhere = open("/dev/null", "w")  # noqa: SIM115
        config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")
        # As in pytest-xdist's workers: pytest then leaves .pytest_cache and result files to rank 0
        config.workerinput = {}  # type: ignore[attr-defined]


def pytest_report_header(config: pytest.Config) -> str:
    library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
    return f"mpi: {config.stash[ranks_key].comm.size} ranks, {library}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("one_node"):
        import collectives

        if (num_nodes := collectives.world().num_nodes) > 1:
            pytest.skip(f"needs all ranks on one node, and these are on {num_nodes}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if config.stash[ranks_key].comm.size != (2 if has_its_ranks(item, 2) else 4):
            item.add_marker("rest")  # the core runs a test on one number of ranks
    left_out = {item.nodeid for item in items if not (FULL or has_its_ranks(item, config.stash[ranks_key].comm.size))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def has_its_ranks(item: pytest.Item, size: int) -> bool:
    """Whether a normal run carries the test out on so many ranks.

    They are among those that the test is marked for; without a mark a test is for all. Three ranks are an odd number and four a larger
    one, and most faults that one of the two shows the other shows, too. So a test for both runs on one, which its name draws, if the
    numbers of ranks do not share its cases. On several hosts, where few tests run, all of them do.
    """
    marker = item.get_closest_marker("ranks")
    if item.get_closest_marker("gpu"):
        return True
    # another MPI has nothing to do with what marked tests show
    if marker is not None and (size not in marker.args or MPI.get_vendor()[0] != "Open MPI"):
        return False
    is_for_both = item.get_closest_marker("shared_cases") is None and (marker is None or {3, 4} <= set(marker.args))
    return size < 3 or not is_for_both or spans_hosts() or zlib.crc32(item.nodeid.encode()) % 2 == size % 2


@functools.cache
def spans_hosts() -> bool:
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return node.size < MPI.COMM_WORLD.size
    finally:
        node.Free()


def pytest_collection_finish(session: pytest.Session) -> None:
    ranks = session.config.stash[ranks_key]
    mine = [item.nodeid for item in session.items], session.testsfailed
    theirs = ranks.comm.allgather(mine)
    if any(other != theirs[0] for other in theirs):
        counts = ", ".join(f"rank {i}: {len(ids)} tests, {errors} errors" for i, (ids, errors) in enumerate(theirs))
        different = sorted({name for ids, _ in theirs for name in set(ids) ^ set(theirs[0][0])})
        raise pytest.UsageError(f"the ranks collected different tests ({counts}): {different[:5]}")
    ranks.collected = True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield
    agree(item.config, report)
    return report


def agree(config: pytest.Config, report: pytest.TestReport) -> None:
    """Compare one phase of one test with the other ranks, and make it failed here if it was so or different there."""
    ranks = config.stash[ranks_key]
    outcomes = ranks.gather(OUTCOMES.index(report.outcome), STRANDED_S if report.failed else None)
    if outcomes is None:
        end_job(config, f"{report.nodeid} failed here ({report.when}), and other ranks wait in it", report.longreprtext)
    elif len(set(outcomes)) > 1 or report.failed:
        texts = ranks.comm.allgather(report.longreprtext)
        failures = [(i, text) for i, text in enumerate(texts) if OUTCOMES[outcomes[i]] == "failed"]
        # Its own failure a rank shows as pytest does, in colour. Ranks that failed alike are shown once.
        if not report.failed or any(text != report.longreprtext for _, text in failures):
            first = {text: i for i, text in reversed(failures)}
            details = [prefixed(text, i) for text, i in reversed(first.items())]
            report.longrepr = "\n\n".join(details) or "the ranks came to different outcomes"
        report.outcome = "failed"
        words = ", ".join(f"{OUTCOMES[outcome]} on rank {i}" for i, outcome in enumerate(outcomes))
        report.sections.append((f"Ranks, {report.when}", words))


def prefixed(text: str, rank: int) -> str:
    return "\n".join(f"[rank {rank}] {line}" for line in text.splitlines())


def end_job(config: pytest.Config, headline: str, details: str) -> Any:
    """Say on the real stderr why, and end all ranks: those that wait in a collective can be told in no other way."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(prefixed(f"{headline}\n{details}", MPI.COMM_WORLD.rank), file=sys.stderr, flush=True)
    MPI.COMM_WORLD.Abort(1)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    ranks = session.config.stash[ranks_key]
    if (
        ranks.comm.size > 1
        and exitstatus in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.INTERRUPTED)
        and ranks.collected
    ):
        # this rank gives up in the middle of the tests: the others would wait for it
        end_job(session.config, f"pytest ended with exit code {int(exitstatus)}", "")


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    # rank 0 prints this by itself
    if MPI.COMM_WORLD.rank > 0 and not excinfo.errisinstance(KeyboardInterrupt):
        print(prefixed(str(excinfo.value), MPI.COMM_WORLD.rank), file=sys.stderr, flush=True)


def pytest_internalerror(excrepr: object) -> None:
    if MPI.COMM_WORLD.rank > 0:
        print(prefixed(str(excrepr), MPI.COMM_WORLD.rank), file=sys.stderr, flush=True)


@pytest.fixture(scope="session")
def comm() -> Any:
    """`collectives.world()`: all ranks of the run."""
    import collectives

    return collectives.world()


class TwoNodes:
    """An mpi4py communicator whose ranks seem to be on two nodes: the even ones and the odd ones."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpi, name)

    def Dup(self) -> Any:  # noqa: N802
        return TwoNodes(self._mpi.Dup())

    def Split_type(self, kind: int) -> Any:  # noqa: N802
        return self._mpi.Split(self._mpi.rank % 2)


@pytest.fixture(scope="session")
def two_nodes(comm: Any) -> Any:
    """All ranks of the run, as if the odd ones were on another node."""
    import collectives

    return collectives.Communicator(TwoNodes(comm.mpi.Dup()))


@pytest.fixture(scope="session")
def two_nodes_flying(comm: Any) -> Any:
    """As `two_nodes`, with a progress thread."""
    import collectives
    from collectives.progress.on_thread import Thread

    return collectives.Communicator(TwoNodes(comm.mpi.Dup()), progress=Thread())


@pytest.fixture(params=["nccl", "mpi, torch", "mpi, cupy", "host"])
def gpu(request: pytest.FixtureRequest, comm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A `gpu_rig.Gpu`: arrays on a modelled GPU, and a Communicator that reaches them by one of the ways."""
    from gpu_rig import Gpu

    rig = Gpu(comm, request.param, monkeypatch)
    yield rig
    rig.close()


@pytest.fixture
def shared_tmp(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder that is the same one on all ranks (rank 0's `tmp_path`)."""
    return Path(request.config.stash[ranks_key].comm.bcast(str(tmp_path)))
