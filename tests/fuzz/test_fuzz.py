"""Whatever a file from elsewhere has in it, each reader reads it or refuses it in one line: no traceback, hang, signal or much memory.

    python -m pytest tests/fuzz --cases 2000            # all targets; -k NAME for one
    python -m pytest tests/fuzz -k NAME --case 17       # the input of a fault again; its message has this command

A target is a file of tests/fuzz/targets.
"""

import pkgutil
from pathlib import Path

import pytest
import targets
from fuzzing import harness

NAMES = sorted(module.name for module in pkgutil.iter_modules(targets.__path__))
MIN_SHARE = 0.5
"""Of the inputs: they come past the outer check."""


@pytest.mark.parametrize("name", NAMES)
def test_inputs_from_elsewhere(
    name: str, worker: harness.Worker, reports: list[harness.Report], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    case, cases, seed = (pytestconfig.getoption(option) for option in ("--case", "--cases", "--seed"))
    numbers = range(cases) if case is None else range(case, case + 1)
    report = harness.run(worker, f"targets.{name}", seed, numbers, tmp_path)
    reports.append(report)
    if report.missing:
        pytest.skip(report.missing)
    assert not report.faults, "\n\n".join(report.faults)
    if len(numbers) >= 50:  # of fewer it would be chance
        assert report.passed >= MIN_SHARE * report.cases, str(report)
        assert 0 < report.refused < report.cases, f"{report}: a target shows nothing that refuses all inputs, or none"
