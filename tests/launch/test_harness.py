"""The conftests of tests/ and tests/mpi/ catch what goes wrong on one rank. Shown on small test files under a real mpirun."""

import shutil
from pathlib import Path

import pytest
from launching import ROOT, Result, launch

TESTS = ROOT / "tests"


def pytest_under_mpi(folder: Path, source: str, num_ranks: int = 2) -> Result:
    """Run `source` as a file of tests/mpi on `num_ranks` ranks, under copies of our conftests."""
    (folder / "tests/mpi").mkdir(parents=True)
    for name in ("conftest.py", "mpi/conftest.py"):
        shutil.copy(TESTS / name, folder / "tests" / name)
    header = "import time\nimport pytest\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
    (folder / "tests/mpi/test_small.py").write_text(header + source)
    command = [
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        "tests/mpi",
    ]
    return launch(
        num_ranks, *command, cwd=folder, env={"MPITRAIN_TEST_STRANDED_S": "1", "PY_COLORS": "0"}, timeout_s=60
    )


def test_passing_tests_are_reported_once(tmp_path: Path) -> None:
    result = pytest_under_mpi(tmp_path, "def test_a():\n    world.barrier()\n")
    assert result.returncode == 0, str(result)
    assert result.stdout.count("1 passed") == 1, str(result)
    assert "2 ranks" in result.stdout, str(result)


@pytest.mark.rest
def test_a_failure_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    result = pytest_under_mpi(
        tmp_path, "def test_a():\n    assert world.rank != 1, 'only here'\n\ndef test_b():\n    pass\n"
    )
    assert result.returncode != 0, str(result)
    assert result.stdout.count("1 failed, 1 passed") == 1, str(result)
    assert "[rank 1] E       AssertionError: only here" in result.stdout, str(result)
    assert "passed on rank 0, failed on rank 1" in result.stdout, str(result)


@pytest.mark.rest
def test_a_failure_in_a_fixture_of_one_rank_keeps_all_from_the_test(tmp_path: Path) -> None:
    source = "@pytest.fixture\ndef thing():\n    assert world.rank == 0\n\ndef test_a(thing):\n    world.barrier()\n"
    result = pytest_under_mpi(tmp_path, source)
    assert result.returncode != 0, str(result)
    assert result.stdout.count("1 error") == 1, str(result)


@pytest.mark.rest
def test_a_rank_that_fails_while_others_wait_for_it_ends_the_job(tmp_path: Path) -> None:
    result = pytest_under_mpi(tmp_path, "def test_a():\n    assert world.rank != 1, 'only here'\n    world.barrier()\n")
    assert result.returncode != 0, str(result)
    assert "[rank 1] E       AssertionError: only here" in result.stderr, str(result)
    assert result.seconds < 20, str(result)


@pytest.mark.rest
def test_a_hang_of_one_rank_ends_with_the_stacks_of_all(tmp_path: Path) -> None:
    source = (
        "def oversleep():\n    time.sleep(600)\n\n"
        "@pytest.mark.timeout_s(2)\ndef test_a():\n    oversleep() if world.rank == 1 else world.barrier()\n"
    )
    result = pytest_under_mpi(tmp_path, source)
    assert result.returncode != 0, str(result)
    for rank in range(2):
        assert f"[rank {rank}] watchdog: tests/mpi/test_small.py::test_a has not ended after 2 s" in result.stderr, (
            result
        )
    assert "in oversleep" in result.stderr, str(result)
    assert result.seconds < 30, str(result)


@pytest.mark.rest
def test_ranks_that_disagree_whether_to_skip_fail(tmp_path: Path) -> None:
    result = pytest_under_mpi(tmp_path, "def test_a():\n    if world.rank:\n        pytest.skip('not here')\n")
    assert result.returncode != 0, str(result)
    assert "different outcomes" in result.stdout, str(result)


@pytest.mark.rest
def test_ranks_that_collect_different_tests_run_none(tmp_path: Path) -> None:
    source = "@pytest.mark.parametrize('n', range(world.rank + 1))\ndef test_a(n):\n    pass\n"
    result = pytest_under_mpi(tmp_path, source)
    assert result.returncode != 0, str(result)
    assert "the ranks collected different tests" in result.stdout + result.stderr, str(result)
    assert "passed" not in result.stdout, str(result)


@pytest.mark.rest
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_crash_of_the_last_rank_ends_the_job(tmp_path: Path, num_ranks: int) -> None:
    source = "import os\ndef test_a():\n    os._exit(3) if world.rank == world.size - 1 else world.barrier()\n"
    result = pytest_under_mpi(tmp_path, source, num_ranks)
    assert result.returncode != 0, str(result)
