"""The options of the fuzz tests, one worker for all targets, and the figures at the end of a run."""

from collections.abc import Iterator

import pytest
from fuzzing.harness import Report, Worker

reports_key = pytest.StashKey[list[Report]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "inputs from elsewhere (tests/fuzz)")
    group.addoption("--cases", type=int, default=100, help="mutated inputs of each target (default: %(default)s)")
    group.addoption("--seed", type=int, default=0, help="other inputs (default: %(default)s)")
    group.addoption("--case", type=int, help="only the input with this number")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[reports_key] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Each input has a limit of its own. This one is for the whole of a target.
    for item in items:
        if item.path.name == "test_fuzz.py":
            item.add_marker(pytest.mark.timeout_s(180 + config.getoption("--cases")))


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process that has imported what the targets so far need."""
    made = Worker(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


@pytest.fixture
def reports(pytestconfig: pytest.Config) -> list[Report]:
    """What is printed at the end of the run."""
    return pytestconfig.stash[reports_key]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reports := config.stash[reports_key]:
        terminalreporter.section("fuzz")
        for report in reports:
            terminalreporter.write_line(str(report))
