"""`python -m mpitrain chaos` with real jobs, once each of two cases: jobs that harm themselves, and the table of the results."""

import json
import sys
from pathlib import Path

from launching import ROOT, run


def test_a_stuck_rank_and_a_flipped_bit_are_named(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "mpitrain", "chaos"]
    result = run(
        [*command, "gil", "flip-shard", "--trials", "1", "--results", results], cwd=ROOT, timeout_s=100
    )  # fmt: skip
    assert result.returncode == 0, str(result)
    outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(outcome["case"], outcome["ok"]) for outcome in outcomes] == [("gil", True), ("flip-shard", True)]
    assert -1.0 < outcomes[0]["noticed_s"] < 2.0
    table = run([*command, "--table", results], cwd=ROOT)
    assert "| a rank that holds the GIL | 1 of 1 |" in table.stdout, str(table)
    assert table.stdout in result.stdout
