"""`python -m mpitrain chaos` with real jobs: a case of each kind of fault, or all cases in a full run of the tests.

The loss of a whole host takes longer: see test_supervisor.py and collectives/test_losses.py. Other tests have other losses of ranks
(test_elastic.py), stuck ranks (collectives/test_diagnosis.py) and stops by signals (test_main_job.py).
"""

import json
import sys
from pathlib import Path

import pytest
from extent import FULL
from hosts import need_namespaces
from launching import ROOT, run

KINDS = {
    "in place": ("two", "kill"),
    "stuck": ("gil", "sleep", "io"),
    "ends": ("mpirun", "sigterm", "ctrl-c"),
    "silent": ("flip-shard", "flip-replicated"),
}


def test_a_job_on_two_hosts_goes_on() -> None:
    need_namespaces()
    command = [sys.executable, "-m", "mpitrain", "chaos", "kill-hosts", "--trials", "1"]
    result = run(command, cwd=ROOT, timeout_s=150)
    assert result.returncode == 0 and "| 1 of 1 |" in result.stdout, str(result)


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_harmed_job_does_what_is_expected(kind: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    cases, trials = (KINDS[kind], 2) if FULL else (KINDS[kind][:1], 1)
    command = [sys.executable, "-m", "mpitrain", "chaos"]
    result = run([*command, *cases, "--trials", str(trials), "--results", results], cwd=ROOT, timeout_s=240)
    assert result.returncode == 0, str(result)
    outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(outcome["case"], outcome["ok"]) for outcome in outcomes] == [
        (case, True) for case in cases for _ in range(trials)
    ]
    if kind == "stuck":
        assert all(-1.0 < outcome["noticed_s"] < 2.0 for outcome in outcomes)
    table = run([*command, "--table", results], cwd=ROOT)
    assert table.stdout in result.stdout and table.stdout.count(f"| {trials} of {trials} |") == len(cases), str(table)
