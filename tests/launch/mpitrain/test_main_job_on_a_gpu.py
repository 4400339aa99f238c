"""`python -m mpitrain` on a real GPU."""

import json
from pathlib import Path

import pytest
from main_job import losses, trained
from trace_checks import checked

pytestmark = pytest.mark.gpu

BF16 = ("--parallel.param-dtype", "bfloat16", "--parallel.reduce-dtype", "float32")


def test_a_run_its_figures_and_its_resume(tmp_path: Path, corpus: Path) -> None:
    """It learns, records the GPU, traces kernels, and goes on from its last checkpoint."""
    pytest.importorskip("pynvml")
    folder = tmp_path / "run"
    settings = ("--parallel.device", "cuda", *BF16)
    ended = trained(1, folder, corpus, *settings, "--log.trace-steps", "30:31", "--log.layers-every", "20")
    assert "GPU" in ended.stdout, str(ended)
    found = losses(folder)
    assert found[-1] < found[0] - 0.5

    events = checked(next((folder / "traces").glob("*.json.gz")), 1)
    rows = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert any(name.startswith("GPU stream") for name in rows), rows
    assert sum(each.get("cat") == "kernel" for each in events) > 20

    lines = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    gauges = next(line["gauges"] for line in lines if "gauges" in line)
    assert gauges["gpu_watts"][0] > 0 and 0 < gauges["gpu_celsius"][0] < 120
    assert gauges["memory/parameters_bytes"][0] > 0

    resumed = trained(1, folder, corpus, *settings, "--train.steps", "70")
    assert "goes on from" in resumed.stdout, str(resumed)
    assert len(losses(folder)) == 70
