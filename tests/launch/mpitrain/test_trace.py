"""`python -m mpitrain trace RUN` during a real run."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import Result, run
from main_job import metrics, train
from trace_checks import checked

pytestmark = pytest.mark.rest


def test_a_trace_during_a_run(tmp_path: Path, corpus: Path) -> None:
    """All ranks trace the same two steps. The run goes on, and is then asked to stop."""
    folder = tmp_path / "run"

    def ask() -> Result:
        until = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.05)
        return run([sys.executable, "-m", "mpitrain", "trace", str(folder), "--steps", "2"], timeout_s=60)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        options = {"when": "traced ", "send": signal.SIGUSR1}
        trained = train(2, folder, corpus, "--train.steps", "1000000", "--train.eval-batches", "0", **options)
        result = asked.result()
    assert trained.returncode == result.returncode == 0, f"{trained}\n{result}"
    file = Path(result.stdout.splitlines()[1])
    assert file.parent == folder / "traces"
    assert "https://ui.perfetto.dev" in result.stdout
    steps = [each["name"] for each in checked(file, 2) if each.get("cat") == "step"]
    first = int(steps[0].split()[1])
    assert steps == [f"step {first}", f"step {first + 1}"] * 2
    assert metrics(folder)[-1]["step"] > first + 1
    assert not (folder / ".trace").exists()
