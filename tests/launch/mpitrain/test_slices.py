"""Runs with slices: the same bits in another layout, after a resume on other ranks, and after the loss of a rank."""

import json
import sys
from pathlib import Path

import pytest
from launching import ROOT, is_open_mpi, run

pytestmark = pytest.mark.rest

ROWS = [("resumed", 3, 0), ("resumed", 1, 3), ("killed", 4, 0)]
"""Case, ranks, and the step after which a run begins."""


@pytest.mark.timeout_s(180)
def test_the_short_form_of_bench_bits(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row[0] != "killed" or is_open_mpi()]
    figures = tmp_path / "runs.jsonl"
    cases = ",".join(dict.fromkeys(row[0] for row in rows))
    command = [sys.executable, "-m", "mpitrain", "bench", "bits", "--cases", cases]
    command += ["--models", "gpt", "--steps", "8", "--stops", "3", "--settings", "--parallel.storage private"]
    result = run(
        [*command, "--json", figures, "--folder", tmp_path], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout_s=160
    )
    assert result.returncode == 0, str(result)
    runs = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [(each["case"], each["ranks"], each["after"]) for each in runs] == rows
    assert {each["result"] for each in runs} == {"the same bits"}
    assert f"the same bits as on one rank: {len(rows)} of {len(rows)} runs of 8 steps" in result.stdout, str(result)
    assert list(tmp_path.iterdir()) == [figures], "the runs are removed"
