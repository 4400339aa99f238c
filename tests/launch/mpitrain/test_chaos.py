"""`python -m mpitrain chaos` with real jobs: a case of each kind of fault, some with a smaller model, or in a full run all cases.

The loss of a whole host takes longer: see test_supervisor.py and collectives/test_losses.py. Other tests have other losses of ranks
(test_elastic.py), stuck ranks (collectives/test_diagnosis.py) and stops by signals (test_main_job.py).
"""

import json
import sys
from pathlib import Path

import pytest
from extent import FULL, extent
from hosts import need_namespaces
from launching import ROOT, Result, run

KINDS = {
    "in place": ("two", "kill"),
    "stuck": ("gil", "sleep", "io"),
    "ends": ("mpirun", "sigterm", "ctrl-c"),
    "silent": ("flip-shard", "flip-replicated"),
    "attacked": ("ring-many", "ring-replay-hosts"),
}


COMMAND = [sys.executable, "-m", "mpitrain", "chaos"]
# Most of a trial's time goes into the steps of its model, of which the tests need no more than a harm in the middle.
SMALL_CASES = """
import signal, sys
from mpitrain.chaos import harms
from mpitrain.chaos.cases import BY_NAME
from mpitrain.chaos.command import main

def small(name, steps, harm):
    model = ("--model.width", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", "32")
    settings = (*BY_NAME[name].settings, *model, "--train.steps", str(steps))
    BY_NAME[name] = BY_NAME[name]._replace(settings=settings, num_steps=steps, harm=harm)

small("kill-hosts", 150, harms.at_random(4, 0.8))
small("mpirun", 200, harms.launcher(signal.SIGKILL, seconds=0.4))
sys.exit(main(sys.argv[1:]))
"""


def chaos(*words: str | Path) -> Result:
    command = COMMAND if FULL else [sys.executable, "-c", SMALL_CASES]
    return run([*command, *words], cwd=ROOT, timeout_s=240)


@pytest.mark.timeout_s(300)
def test_a_job_on_two_hosts_goes_on() -> None:
    need_namespaces()
    result = chaos("kill-hosts", "--trials", "1")
    assert result.returncode == 0 and "| 1 of 1 |" in result.stdout, str(result)


@pytest.mark.timeout_s(300)
# The case of two hosts above has the verdict of "in place", and test_elastic.py the loss of two ranks at once. Stuck ranks are in
# collectives/test_losses.py, flipped bits in test_silent_faults.py, and attacks in unit/collectives/test_ring_links.py.
@pytest.mark.parametrize("kind", extent(["ends"], list(KINDS)))
def test_a_harmed_job_does_what_is_expected(kind: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    cases, trials = (KINDS[kind], 2) if FULL else (KINDS[kind][:1], 1)
    result = chaos(*cases, "--trials", str(trials), "--results", results)
    assert result.returncode == 0, str(result)
    outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(outcome["case"], outcome["ok"]) for outcome in outcomes] == [
        (case, True) for case in cases for _ in range(trials)
    ]
    if kind == "stuck":
        assert all(-1.0 < outcome["noticed_s"] < 2.0 for outcome in outcomes)
    table = run([*COMMAND, "--table", results], cwd=ROOT)
    assert table.stdout in result.stdout and table.stdout.count(f"| {trials} of {trials} |") == len(cases), str(table)
