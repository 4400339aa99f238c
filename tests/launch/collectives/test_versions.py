"""Ranks of several versions of this package in one job: each of them ends with a word, whichever rank has which version."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launching import ROOT, Result, launch

OLD = "451fa24"
"""A commit whose ranks do not meet."""

JOB = """
import os, sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
sys.path.insert(0, sys.argv[1 + rank])
import collectives
comm = collectives.world()
print("a world of", comm.size, "with", collectives.__file__, flush=True)
"""


def job(*folders: Path, cwd: Path) -> Result:
    env = {"MPITRAIN_MEETING_S": "0.3", "MPITRAIN_DEADLINE_S": "1.2"}
    return launch(len(folders), "-c", JOB, *map(str, folders), cwd=cwd, env=env, timeout_s=30)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    made = subprocess.run(["git", "-C", ROOT, "archive", OLD, "collectives"], capture_output=True, timeout=60)
    if made.returncode:
        pytest.skip(f"needs commit {OLD}, which a shallow clone does not have")
    subprocess.run(["tar", "-x", "-C", folder], input=made.stdout, check=True, timeout=60)
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_of_a_version_that_does_not_meet_is_named(silent: int, old: Path, tmp_path: Path) -> None:
    result = job(*((old, ROOT) if silent == 0 else (ROOT, old)), cwd=tmp_path)
    assert result.returncode not in (0, 124) and "a world" not in result.stdout, str(result)
    said = re.findall(
        rf"world\(\) has waited \d s for rank {silent}: another version .*, or still importing", result.stderr
    )
    assert len(said) == 1, str(result)
    assert f"world() has had no answer of rank {silent} within 1.2 s (MPITRAIN_DEADLINE_S)" in result.stderr, str(
        result
    )


def test_two_copies_of_the_sources_that_differ(tmp_path: Path) -> None:
    copies = [tmp_path / name for name in "ab"]
    for copy in copies:
        shutil.copytree(ROOT / "collectives", copy / "collectives", ignore=shutil.ignore_patterns("__pycache__"))
    (copies[1] / "collectives/jax.py").write_text("_one_line = 1\n")
    result = job(*copies, cwd=tmp_path)
    assert result.returncode == 1 and "a world" not in result.stdout, str(result)
    words = (
        r"different versions of mpitrain: .* \(commit .*, sources \w+\) on rank 0; .* sources \w+\) on rank 1; expected"
    )
    assert len(re.findall(words, result.stderr)) == 1, str(result)
