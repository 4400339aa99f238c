"""The kernel's OOM killer ends processes of jobs: reports name it, and the limit of the cgroup, and take no other kill for its own.

Needs the right to make cgroups: real kills in groups as those of Slurm, one for each task in one for the job, which has the limit.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import ROOT, is_open_mpi, job_environment, run
from memory_groups import LimitedGroup, limited_group

LIMIT = 400 << 20
TAKE = 'taken = [bytearray(b"1") * (16 << 20) for _ in range(60)]'
NAMED = r"the kernel's OOM killer has ended 1 process of the cgroup {where}, because {why}400 MiB{end}"
HINT = "ask for more memory (Slurm: --mem, docker: --memory), or start fewer ranks on a node (docs/faults.md)"


@pytest.fixture(scope="module")
def group() -> Iterator[LimitedGroup]:
    with limited_group(LIMIT) as made:
        yield made


def named(where: Path, outer: Path | None = None) -> str:
    if outer is None:
        return NAMED.format(where=where, why="its limit of memory, ", end=", was reached")
    return NAMED.format(where=where, why=f"the outer cgroup {outer} had reached its limit of memory, ", end="")


def job(group: LimitedGroup, end: str, file: Path) -> str:
    """The text that a job of two ranks prints, of which rank 1 ends by the statement `end`."""
    mpirun, settings = job_environment(2)
    script = f"""
import os, signal, subprocess, sys, collectives
comm = collectives.world()
comm.barrier()
if comm.rank == 1:
    {end}
comm.barrier()
"""
    line = [mpirun, "-np", "2", *group.enter("task_$OMPI_COMM_WORLD_RANK"), sys.executable, "-c", script]
    env = {**settings, "MPITRAIN_FAILURE_FILE": str(file)}
    result = run([*group.enter("launcher"), *line], cwd=ROOT, env=env, timeout_s=40)
    assert result.returncode != 0, str(result)
    return result.stderr


@pytest.mark.rest
@pytest.mark.skipif(not is_open_mpi(), reason="the tasks take their numbers from Open MPI's mpirun")
def test_the_kill_of_a_rank_is_named_with_the_limit_and_a_later_one_by_hand_is_not(
    group: LimitedGroup, tmp_path: Path
) -> None:
    printed = job(group, TAKE, tmp_path / "failure.txt")
    words = named(group.folder / "task_1", group.folder)
    for text in ((tmp_path / "failure.txt").read_text(), printed):
        report = next(line for line in text.splitlines() if "rank 1 on" in line)
        assert re.search(
            rf"process \d+\) has died: its process ended without notice; it was killed.*: {words}: ", report
        ), text
        assert HINT in report and text.count("OOM killer") == 1, text
    printed = job(group, "os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "later.txt")
    later = (tmp_path / "later.txt").read_text()
    assert "rank 1 on" in later and "OOM" not in later + printed, f"{later}\n{printed}"


def test_the_kill_of_a_worker_is_named_beside_the_error_that_it_causes(group: LimitedGroup, tmp_path: Path) -> None:
    script = f"""
import subprocess, sys, collectives
collectives.world()
subprocess.run([sys.executable, "-S", "-c", {TAKE!r}], check=True)
"""
    file = tmp_path / "failure.txt"
    env = {**job_environment(1)[1], "MPITRAIN_FAILURE_FILE": str(file)}
    result = run([*group.enter("alone"), sys.executable, "-c", script], cwd=ROOT, env=env, timeout_s=40)
    words = named(group.folder / "alone", group.folder)
    assert re.search(words, file.read_text()) and re.search(words, result.stderr), str(result)
    assert "CalledProcessError" in file.read_text()


def test_the_supervisor_names_the_kill_of_a_job_that_has_left_no_report(group: LimitedGroup, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "mpitrain", "elastic", "--max-relaunches", "0", "--"]
    line += ["sh", "-c", f"exec {sys.executable} -S -c '{TAKE}'", "--run", str(tmp_path / "run")]
    result = run([*group.enter("supervised"), *line], cwd=ROOT, env={}, timeout_s=40)
    words = named(group.folder / "supervised", group.folder)
    assert result.returncode == 1 and re.search(words, result.stderr), str(result)
    events = (tmp_path / "run/events.jsonl").read_text()
    assert re.search(words, events) and HINT in events, events
