"""`python -m mpitrain doctor` in real jobs: a healthy one, real faults, and a process that hangs or dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import need_namespaces
from launching import ROOT, Result, clean_environment, is_open_mpi, launch, run

from mpitrain.tools.doctor.checks import CHECKS

pytestmark = pytest.mark.rest

MPICH = ROOT / ".venv/mpich/bin/mpirun"
DOCTOR = ("-m", "mpitrain", "doctor")


def report(result: Result) -> dict[str, Any]:
    """The JSON report, which is all that stands on stdout."""
    said: dict[str, Any] = json.loads(result.stdout)
    assert said["exit_code"] == result.returncode, str(result)
    return said


def of_level(said: dict[str, Any], level: str) -> list[dict[str, str]]:
    return [finding for finding in said["findings"] if finding["level"] == level]


def test_a_job_on_this_machine_has_no_error(tmp_path: Path) -> None:
    result = launch(2, *DOCTOR, "--json", "--disk-bytes", "4MiB", "--run", str(tmp_path / "run"), cwd=ROOT)
    assert result.returncode == 0, str(result)
    said = report(result)
    assert of_level(said, "error") == []
    assert set(said["facts"]) == {check.name for check in CHECKS}  # each was carried out
    mpi = said["facts"]["MPI"]
    assert len(mpi) == 2 and all(its["size"] == 2 and its["num_nodes"] == 1 for its in mpi.values())
    assert len(said["facts"]["cores"]) == 2 and len(said["facts"]["run's folder"]) == 1
    (link,) = said["facts"]["links"].popitem()[1]
    assert link[2] > 1e6 and link[3] > 0  # bytes/s, seconds
    assert {finding["group"] for finding in said["findings"]} == {check.group for check in CHECKS}
    assert list(tmp_path.iterdir()) == []  # no folder, no file


def test_node_memory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    only = ("--only", "node memory,shared arrays")
    result = launch(2, *DOCTOR, *only, cwd=ROOT, env={"MPITRAIN_SHM_DIR": missing})
    assert result.returncode == 1, str(result)
    words = " ".join(result.stdout.split())
    assert f"error node memory cannot make a file of 1 MiB in {missing}: No such file or directory" in words
    assert "do: see its permissions (/dev/shm: chmod 1777), or let MPITRAIN_SHM_DIR name another folder" in words
    assert "error shared arrays cannot share 16 B of node memory" in words
    assert "2 errors; exit code 1" in words and "Traceback" not in result.stdout + result.stderr, str(result)


def test_the_mpirun_of_one_mpi_and_the_library_of_another() -> None:
    if not is_open_mpi() or not MPICH.exists():
        pytest.skip("needs PyPI's MPICH beside Open MPI")
    result = run([MPICH, "-np", "2", sys.executable, *DOCTOR, "--json", "--only", "limits,links"], cwd=ROOT)
    assert result.returncode == 1, str(result)
    said = report(result)
    (error,) = of_level(said, "error")
    assert "an mpirun of MPICH's family has started 2 ranks" in error["found"], str(result)
    assert "mpirun and library of one MPI" in error["remedy"]
    assert list(said["facts"]) == ["limits"]  # what needs no MPI is checked nevertheless
    assert [each["found"] for each in said["findings"] if each["topic"] == "not checked"] == ["links"]


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (signal.SIGKILL, "the process of this rank was ended by SIGKILL"),
        (signal.SIGSTOP, "s; the process is stopped by a signal"),
    ],
)
def test_a_crash_or_a_hang_is_a_finding(number: int, found: str) -> None:
    """The process that checks is killed or stopped in its first check; another one does the rest."""
    command = [sys.executable, *DOCTOR, "--json", "--limit", "1", "--only", "HDF5,limits"]
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True) as doctor:
        try:
            worker, end = 0, time.monotonic() + 30
            while not worker and time.monotonic() < end:
                worker = busy_child(doctor.pid)
                time.sleep(0.005)
            assert worker, "no process checks HDF5"
            os.kill(worker, number)
            output, _ = doctor.communicate(timeout=30)
        finally:
            doctor.kill()
    said = json.loads(output)
    assert doctor.returncode == said["exit_code"] == 1
    (error,) = of_level(said, "error")
    assert error["topic"] == "HDF5" and found in error["found"] and error["remedy"], error
    assert list(said["facts"]) == ["limits"] and not Path(f"/proc/{worker}").exists()


def busy_child(pid: int) -> int:
    """The child of the doctor, once it has started the process in which HDF5 is tried; else 0.

    Imports start processes, too: a child that is stopped in one of those has begun no check, and has 60 s for the start.
    """
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            for task in Path(f"/proc/{child}/task").iterdir():
                for grandchild in (task / "children").read_text().split():
                    if b"mpitrain.tools.doctor.packages" in Path(f"/proc/{grandchild}/cmdline").read_bytes():
                        return int(child)
    except OSError:
        pass
    return 0


def test_two_hosts() -> None:
    need_namespaces()
    names = "MPI,same folder,host names,clocks,links,TCP ports"
    job = ("-H", "2x1", "--rate", "200mbit", "--timeout", "50", "--", "python", *DOCTOR, "--json", "--only", names)
    result = run([ROOT / "mpirun/cluster", "run", *job], cwd=ROOT)
    said = report(result)
    assert of_level(said, "error") == [], str(result)
    assert set(said["facts"]["clocks"]) == {"host1", "host2"}
    assert abs(said["facts"]["clocks"]["host2"]["ahead_s"]) < 0.1  # both have the clock of this machine
    (link,) = said["facts"]["links"].popitem()[1]
    assert 5e6 < link[2] < 30e6, "a link of 200 Mbit/s moves 25 MB/s"
    (slow,) = of_level(said, "warning")
    assert slow["topic"] == "between hosts" and "rank 0 on host1 to rank 1 on host2" in slow["found"]
    assert [reach[2] for reach in said["facts"]["TCP ports"].popitem()[1]] == [True, True]
