"""A run with all that sees it, and the commands that show it afterwards."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest
from launching import ROOT, run
from main_job import metrics, trained

pytestmark = pytest.mark.rest

HOOKS = ROOT / "examples/hooks.py"


def test_a_run_is_seen_by_files_sinks_hooks_alerts_and_commands(corpus: Path, tmp_path: Path) -> None:
    docs = (ROOT / "docs/monitoring.md").read_text()
    assert HOOKS.read_text().partition('"""\n\n')[2] in re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    folder, alerted = tmp_path / "run", tmp_path / "alerted"
    options = [
        *("--log.modules", str(HOOKS), "--log.sinks", "csv", "tensorboard", "--log.layers-every", "10"),
        *("--log.on-event", f"cat >> {alerted}", "--log.trace-steps", "31:32", "--train.sample-bytes", "0"),
    ]
    result = trained(2, folder, corpus, *options)
    steps = [line for line in metrics(folder) if "loss" in line]
    assert [line["my/tokens"] for line in steps] == [12 * 32 * step for step in range(1, 61)]
    assert [line["step"] for line in steps if "grad_norm/blocks.1" in line] == [10, 20, 30, 40, 50, 60]
    assert result.stdout.count(f"saved {folder / 'checkpoints'}") >= 3 and "saved" in result.stdout
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["begin", "save", "trace", "save", "save", "end"]
    assert sorted(json.loads(line)["time"] for line in alerted.read_text().splitlines()) == [e["time"] for e in events]
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [line["loss"] for line in steps]
    assert len(list((folder / "tensorboard").iterdir())) == 1

    for command, wanted in (
        (["report", str(folder)], "report.html"),
        (["watch", str(folder), "--once"], "finished"),
        (["profile", str(folder)], "what to try"),
        (["trace", str(folder), "--draw", str(tmp_path / "trace.svg")], "trace.svg"),
    ):
        shown = run([sys.executable, "-m", "mpitrain", *command], timeout_s=60)
        assert shown.returncode == 0 and wanted in shown.stdout, str(shown)
    page = (folder / "report.html").read_text()
    assert "traces/step-00000031.json.gz" in page and "<svg" in (tmp_path / "trace.svg").read_text()
