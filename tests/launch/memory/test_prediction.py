"""`python -m mpitrain memory` says what a run then holds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extent import extent
from launching import ROOT, launch

pytestmark = [pytest.mark.rest, pytest.mark.timeout_s(240)]

# The main job, and then the most that each rank held. Private pages are counted at their peak: the kernel keeps that of all pages
# (VmHWM), and shared memory and files do not shrink. Pages of shared memory count by PSS, those of libraries as if this job alone
# used them, which other programs on the machine may too.
MEASURE = """
import json, re, sys
import collectives
from mpitrain.job.config import parse
from mpitrain.job.train.trainer import Trainer

def numbers(path):
    return {m[1]: 1024 * int(m[2]) for m in re.finditer(r"^(\\w+):\\s+(\\d+) kB", open(path).read(), re.M)}

comm = collectives.world()
trainer = Trainer(parse(sys.argv[1:]), comm)
trainer.fit()
comm.barrier()
status, pss = numbers("/proc/self/status"), numbers("/proc/self/smaps_rollup")
comm.barrier()
private = status["VmHWM"] - status["RssShmem"] - status["RssFile"]
held = private + pss["Pss_Shmem"] + status["RssFile"] // comm.size
for rank in comm.all_gather_object(held):
    if comm.rank == 0:
        print("held", rank, flush=True)
"""

# Each tensor is a mapping of its own, which goes back to the system when it is freed: what glibc's heap keeps differs between two runs
# of one command, by up to twice the activations.
NO_HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

PRIVATE = ["--parallel.storage", "private"]
SETTINGS = {
    "resident, fp32": [],
    "gathered, bf16": [*PRIVATE, "--parallel.param-dtype", "bfloat16"],
    "gathered ahead": PRIVATE,
    "stage 1": ["--parallel.stage", "1"],
    "llama": ["--model.family", "llama", "--model.kv-heads", "2"],
    "tensor": ["--parallel.tensor", "2"],
    "tensor, whole tokens": ["--parallel.tensor", "2", "--parallel.sequence", "false"],
    "tensor, computed again": ["--parallel.tensor", "2", "--parallel.checkpoint-activations", "--train.batch", "16"],
    "pipeline": ["--parallel.pipeline", "2", "--train.accumulate", "4"],
    "pipeline, bf16": ["--parallel.pipeline", "2", "--train.accumulate", "4", "--parallel.param-dtype", "bfloat16"],
    "split backwards": ["--parallel.pipeline", "2", "--parallel.schedule", "zb-v", "--train.accumulate", "4"],
    "slices": ["--train.slices", "8", "--train.batch", "8"],
    "computed again": ["--parallel.checkpoint-activations", "--train.batch", "16"],
}


def predicted_and_held(tmp_path: Path, which: str, allocator: dict[str, str]) -> tuple[dict[str, Any], list[int]]:
    """What `memory` says, and the bytes that each of two ranks then holds."""
    text = tmp_path / "text"
    text.write_bytes(b"all work and no play makes jack a dull boy " * 5000)
    model = ["--model.width", "384", "--model.layers", "8", "--model.heads", "6"]  # 14 M parameters
    train = ["--train.batch", "4", "--train.steps", "2", "--train.eval-batches", "0", "--train.sample-bytes", "0"]
    settings = [*model, *train, "--data.path", str(text), "--run", str(tmp_path / "run"), *SETTINGS[which]]

    environment = {"MPITRAIN_PROGRESS_THREAD": "1"} if which == "gathered ahead" else {}
    command = [sys.executable, "-m", "mpitrain", "memory", "--np", "2", "--json", *settings]
    answer = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    predicted = json.loads(answer.stdout)

    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    result = launch(2, str(script), *settings, env={"PYTHONPATH": str(ROOT)} | environment | allocator, timeout_s=150)
    assert result.returncode == 0, str(result)
    held = [int(line[5:]) for line in result.stdout.splitlines() if line.startswith("held ")]
    assert len(held) == 2, str(result)
    return predicted, held


@pytest.mark.parametrize("which", extent(["pipeline, bf16"], list(SETTINGS)))
def test_a_run_holds_what_was_predicted(tmp_path: Path, which: str) -> None:
    predicted, held = predicted_and_held(tmp_path, which, NO_HEAP)
    counted = predicted["rank_total"] - predicted["rank"]["allocator"]
    # Measured: within 5.5 %. What a library allocates differs between machines. Of a pipeline, one rank holds more than the other.
    compared = [max(held)] if "--parallel.pipeline" in SETTINGS[which] else held
    assert compared == pytest.approx([counted] * len(compared), rel=0.06), (held, predicted)


@pytest.mark.parametrize("which", ["computed again", *extent([], ["resident, fp32"])])
def test_a_run_with_its_heap_holds_no_more(tmp_path: Path, which: str) -> None:
    predicted, held = predicted_and_held(tmp_path, which, {})
    counted = predicted["rank_total"] - predicted["rank"]["allocator"]
    assert 0.94 * counted < min(held) <= max(held) < 1.06 * predicted["rank_total"], (held, predicted)
