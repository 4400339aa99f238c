"""Jobs of a real Slurm on two hosts of mpirun/cluster. tests/helpers/slurm_losses.py measures more: requeues, preemption, limits."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from extent import extent
from hosts import cluster, need_namespaces
from launching import ROOT, Result, is_open_mpi
from main_job import STEPS, command, losses
from slurm_packages import slurm_root

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
    pytest.mark.skipif(not is_open_mpi(), reason="srun --mpi=pmix starts the ranks of Open MPI"),
]


def on_slurm(event: str, folder: Path, run_folder: Path, script: Path, *arguments: str, timeout_s: float) -> Result:
    """The program tests/helpers/slurm_head.py on a cluster of two hosts."""
    need_namespaces()
    root = slurm_root()
    if root is None:
        pytest.skip("Slurm's packages cannot be had here")
    helpers = ROOT / "tests/helpers"
    words = [helpers / "slurm_head.py", event, root, folder, run_folder, script, *arguments]
    options = ["-H", "2x1", "--on-head", "--timeout", f"{timeout_s - 8:.0f}"]
    env = {"PYTHONPATH": f"{ROOT}:{helpers}", "OMP_NUM_THREADS": "1"}
    return cluster(*options, "--", sys.executable, *map(str, words), env=env, timeout_s=timeout_s)


@pytest.mark.rest
@pytest.mark.parametrize("script", extent(["elastic"], ["elastic", "train"]))
def test_a_job_that_is_cancelled_saves_the_step_in_progress(tmp_path: Path, corpus: Path, script: str) -> None:
    folder = tmp_path / "run"
    program = command(folder, corpus, "--train.steps", "100000", "--checkpoint.every", "0")
    result = on_slurm("scancel", tmp_path, folder, ROOT / f"examples/slurm/{script}.sbatch", *program[2:], timeout_s=60)
    assert result.returncode == 0, str(result)
    steps = [line.split("/")[0] for line in result.stdout.splitlines() if line.startswith("step ")]
    assert "2 ranks on 2 nodes" in result.stdout, str(result)
    assert f"stopped after {steps[-1]} as asked" in result.stdout, str(result)
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == [f"step-{int(steps[-1][5:]):08d}"]
    assert "munge" not in result.stdout and "scontrol requeue" not in result.stdout, str(result)


@pytest.mark.skipif(not extent(False, True), reason="in a full run: it takes half a minute")
@pytest.mark.parametrize("launcher", ["srun --mpi=pmix", '"$CLUSTER_MPIRUN" -np "$SLURM_NTASKS"'])
def test_a_job_goes_on_when_a_node_is_lost(
    tmp_path: Path, corpus: Path, whole_run: Callable[[int], Path], launcher: str
) -> None:
    folder, script = tmp_path / "run", tmp_path / "batch.sh"
    program = shlex.join([sys.executable, *command(folder, corpus)])
    script.write_text(f"#!/bin/bash\nexec {sys.executable} -m mpitrain elastic --nodes 1:2 -- {launcher} {program}\n")
    result = on_slurm("loss", tmp_path, folder, script, timeout_s=118)
    assert result.returncode == 0, str(result)
    assert "lost host2" in result.stdout and "state COMPLET" in result.stdout, str(result)
    assert "elastic: launch 1 on host1:1,host2:1" in result.stdout, str(result)
    assert "no answer within 5 s from host2" in result.stdout, str(result)
    assert "elastic: launch 2 on host1:1" in result.stdout, str(result)
    assert len(losses(folder)) == STEPS
    assert losses(folder) == pytest.approx(losses(whole_run(2)), rel=1e-4)
