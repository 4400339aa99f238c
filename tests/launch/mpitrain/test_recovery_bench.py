"""`python -m mpitrain bench recovery`: one kill of our job, and in a full run one of torchrun's."""

import json
import sys
from pathlib import Path

import pytest
from extent import extent
from launching import ROOT, is_open_mpi, run


@pytest.mark.skipif(not is_open_mpi(), reason="only Open MPI goes on in place")
def test_they_recover_and_have_figures(tmp_path: Path) -> None:
    names = extent(["in-place"], ["in-place", "torchrun"])
    words = [sys.executable, "-m", "mpitrain", "bench", "recovery", "--sizes", "tiny", "--trials", "1"]
    words += ["--only", ",".join(names), "--json", str(tmp_path / "rows.json")]
    result = run(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout_s=100)
    assert result.returncode == 0, str(result)
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "rows.json").read_text().splitlines())}
    assert set(rows) == set(names), str(result)
    for row in rows.values():
        assert 0 < row["next_s"] <= row["caught_up_s"] < 60, row
        assert row["first_step"] == 11, "the step after the copies or the checkpoint"
    assert all(f"| tiny, {name} |" in result.stdout for name in names), str(result)
