"""`python -m mpitrain chaos` with real jobs: one case with a smaller model, or in a full run cases of each kind of fault.

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
    "two hosts": ("kill-hosts",),
    "in place": ("two", "kill"),
    "stuck": ("gil", "sleep", "io"),
    "ends": ("mpirun", "sigterm", "ctrl-c"),
    "silent": ("flip-shard", "flip-replicated"),
    "attacked": ("ring-many", "ring-replay-hosts"),
}


COMMAND = [sys.executable, "-m", "mpitrain", "chaos"]
# Most of a trial's time goes into the steps of its model, of which the tests need no more than a harm in the middle.
SMALL_CASES = """
import sys
from benchmarks.chaos import harms
from benchmarks.chaos.cases import BY_NAME
from benchmarks.chaos.chaos_command import main

def small(name, steps, harm):
    model = ("--model.width", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", "32")
    settings = (*BY_NAME[name].settings, *model, "--train.steps", str(steps))
    BY_NAME[name] = BY_NAME[name]._replace(settings=settings, num_steps=steps, harm=harm)

small("kill-hosts", 90, harms.at_random(4, 0.8))
sys.exit(main(sys.argv[1:]))
"""


def chaos(*words: str | Path) -> Result:
    command = COMMAND if FULL else [sys.executable, "-c", SMALL_CASES]
    return run([*command, *words], cwd=ROOT, timeout_s=240)


# The verdict "ends" is in test_supervisor.py, the loss of two ranks at once in test_elastic.py. Stuck ranks are in
# collectives/test_losses.py, flipped bits in test_silent_faults.py, and attacks in unit/collectives/test_ring_links.py.
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("kind", extent(["two hosts"], list(KINDS)))
def test_a_harmed_job_does_what_is_expected(kind: str, tmp_path: Path) -> None:
    if kind == "two hosts":
        need_namespaces()
    results = tmp_path / "results.jsonl"
    cases, trials = KINDS[kind], extent(1, 2)
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
