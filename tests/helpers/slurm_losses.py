"""Measures how many steps a job loses when Slurm ends it, on a real Slurm of two nodes that is made for that (slurm_cluster.py).

    python tests/helpers/slurm_losses.py --runs 5 --output build/slurm-losses.jsonl      # all ways and events, 5 times each
    python tests/helpers/slurm_losses.py --ways train --events scancel --runs 1 --output FILE

Ways: the batch scripts of examples/slurm, elastic.sbatch with and without `train.elastic`. Events: scancel, a requeue, preemption by
an urgent job, with and without a GraceTime, the limit of time, and a requeue of a job on a drained node. With `--save-s 10` each save
of a checkpoint takes so many seconds. Each trial starts a job, waits for step 35,
does the event, and waits until a job of the same run trains again: the job itself after it was queued again, else the same script
submitted once more. The result is one line of JSON: `last`, the last step that was done, `start`, the step from which the run went on,
and `lost`, the difference. Trials that the output has are not done again, so the command can be stopped and started again. The table is
printed at the end. It needs root, namespaces and Debian's packages of Slurm. A trial takes about 30 s, the limit of time two minutes.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slurm_cluster import Slurm
from slurm_packages import slurm_root

ROOT = Path(__file__).resolve().parents[2]
COPY_EVERY = 10
_ELASTIC = ("--train.elastic", "true", "--train.copy-every", str(COPY_EVERY))
WAYS = {"train": ("train", ()), "elastic": ("elastic", ()), "copies": ("elastic", _ELASTIC)}
EVENTS = ("scancel", "requeue", "preempt", "grace", "limit", "drain")
_SLOW = """
import os, re, time

def rename(old, new, _rename=os.rename, **words):
    if re.search(r"step-\\d+$", str(new)):
        time.sleep({save_s})
    _rename(old, new, **words)

os.rename = rename
"""
_JOB = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--requeue")
_RUN = (
    *(
        "--model.width",
        "64",
        "--model.layers",
        "2",
        "--model.heads",
        "2",
        "--model.context",
        "64",
        "--train.batch",
        "32",
    ),
    *("--train.steps", "100000", "--log.every", "1", "--checkpoint.every", "0", "--train.eval-every", "0"),
)
_BEGIN = 35  # the step at which the event comes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=list(EVENTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save-s", type=float, default=0.0, help="a save takes so much longer (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True)
    words = parser.parse_args()
    wanted = [(way, event, run) for run in range(words.runs) for way in words.ways for event in words.events]
    if "CLUSTER_HOSTS" in os.environ:
        return measure(wanted, words.save_s, words.output.absolute())
    if slurm_root() is None:
        raise SystemExit("Slurm's packages cannot be had here")
    words.output.parent.mkdir(parents=True, exist_ok=True)
    command = [os.environ.get("CLUSTER", ROOT / "mpirun/cluster"), "run", "-H", "2x1", "--on-head", "--"]
    code = subprocess.call([*command, sys.executable, *sys.argv])
    print_table(read(words.output))
    return code


def read(output: Path) -> list[dict]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in output.read_text().splitlines()]
    return []


def print_table(results: list[dict]) -> None:
    print(f"{'way':10}{'event':10}{'save s':>7}{'runs':>5}{'failed':>8}{'lost steps: median':>20}{'most':>6}")
    saves = sorted({each.get("save_s", 0.0) for each in results})
    for way in WAYS:
        for event, save_s in itertools.product(EVENTS, saves):
            if mine := [each for each in results if _kind(each) == (way, event, save_s)]:
                lost = [each["lost"] for each in mine if each["lost"] is not None]
                middle, most = (statistics.median(lost), max(lost)) if lost else ("-", "-")
                print(f"{way:10}{event:10}{save_s:7g}{len(mine):5}{len(mine) - len(lost):8}{middle:20}{most:6}")


def _kind(result: dict) -> tuple[str, str, float]:
    return result["way"], result["event"], result.get("save_s", 0.0)


def measure(wanted: list[tuple[str, str, int]], save_s: float, output: Path) -> int:
    """The trials that the output does not have yet, one after another on one Slurm."""
    root, done = slurm_root(), {(*_kind(each), each["run"]) for each in read(output)}
    assert root is not None
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text("\n".join(f"{n} times {n} is {n * n}" for n in range(20_000)))
        os.environ["OMP_NUM_THREADS"] = "1"
        if save_s:
            (folder / "sitecustomize.py").write_text(_SLOW.format(save_s=save_s))
            os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        slurm = Slurm(root, folder)
        for way, event, run in wanted:
            if (way, event, save_s, run) in done:
                continue
            trial = Trial(slurm, folder / f"{way}-{event}-{run}", way, event)
            result = {"way": way, "event": event, "save_s": save_s, "run": run, **trial.result()}
            print(json.dumps(result), flush=True)
            with output.open("a") as file:
                file.write(json.dumps(result) + "\n")
            if result["lost"] is None:
                print(trial.output.read_text() if trial.output.exists() else "no output", flush=True)
    return 0


class Trial:
    """One run that Slurm ends in the middle."""

    def __init__(self, slurm: Slurm, folder: Path, way: str, event: str) -> None:
        folder.mkdir()
        self._starts: list[int] = []
        self._step = self._last = 0
        self.slurm, self.event, self.run, self.output = slurm, event, folder / "run", folder / "output"
        script, extra = WAYS[way]
        self._script = ROOT / f"examples/slurm/{script}.sbatch"
        self._words = [*_RUN, "--data.path", str(slurm.folder / "corpus.txt"), "--run", str(self.run), *extra]

    def result(self) -> dict:
        """The figures; `lost` is None if the run did not go on."""
        began = time.monotonic()
        try:
            lead = ("--time=2", "--signal=B:USR1@60") if self.event == "limit" else ("--time=10",)
            lead = (*lead, "--partition=graced") if self.event == "grace" else lead
            job = self._submit(*lead)
            self._look(lambda: self._step >= (1 if self.event == "limit" else _BEGIN), "the first steps", 120)
            at = self._step
            job = self._harm(job)
            self._look(lambda: len(self._starts) > 1, "a further start", 120)
            last, start = self._last, self._starts[1]
            self._look(lambda: self._step > max(last, start) + 2, "steps after the start", 120)
            result = {"at": at, "last": last, "start": start, "lost": last - start}
            self.slurm.tell("scancel", job)
        except SystemExit as error:
            result = {"lost": None, "problem": str(error)}
        self.slurm.ask("scancel", "--user=root")
        with contextlib.suppress(SystemExit):
            self.slurm.await_nodes("idle", 2)
        shutil.rmtree(self.run, ignore_errors=True)
        return result | {"seconds": round(time.monotonic() - began, 1)}

    def _harm(self, job: str) -> str:
        """End the job, and have it or another one go on; the id of that."""
        slurm = self.slurm
        match self.event:
            case "scancel":
                slurm.tell("scancel", job)
            case "limit":
                pass
            case "requeue":
                slurm.tell("scontrol", "requeue", job)
            case "preempt" | "grace":
                slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
            case "drain":
                slurm.tell("scontrol", "update", "nodename=host2", "state=drain", "reason=test")
                step = self._step
                self._look(lambda: self._step > step + 20, "steps on a drained node", 30)
                slurm.tell("scontrol", "requeue", job)
        self._look(lambda: not re.match("RUNNING|$", slurm.state(job)), "the end of the job", 150)
        if self.event == "drain":
            slurm.tell("scontrol", "update", "nodename=host2", "state=resume")
        is_supervised = self._script.stem == "elastic"
        if self.event in ("requeue", "preempt", "drain") or (self.event in ("grace", "limit") and is_supervised):
            return job
        self._look(lambda: not slurm.ask("squeue", "--noheader"), "the end of all processes", 120)
        return self._submit("--time=10")

    def _submit(self, *words: str) -> str:
        """Submit the script; the id of the job."""
        options = [*_JOB, *words, "--open-mode=append", f"--output={self.output}", f"--chdir={ROOT}"]
        return self.slurm.submit(*options, self._script, *self._words)

    def _look(self, is_reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Follow the run until something is reached; SystemExit after the time."""
        until = time.monotonic() + timeout_s
        while True:
            # First the starts: a further one cuts off the steps that it has lost.
            starts = [event["step"] for event in _lines(self.run / "events.jsonl") if event.get("event") == "begin"]
            if len(starts) > len(self._starts):
                self._starts = starts
            else:
                steps = [line["step"] for line in _lines(self.run / "metrics.jsonl") if "loss" in line]
                self._step = max(steps, default=0)
                if len(starts) < 2:  # a job that goes on cuts off what it has lost, perhaps before its start is seen
                    self._last = max(self._last, self._step)
            if is_reached():
                return
            if time.monotonic() > until:
                raise SystemExit(f"{what} did not come within {timeout_s:g} s; the last step is {self._step}")
            time.sleep(0.05)


def _lines(file: Path) -> list[dict]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    return []


if __name__ == "__main__":
    raise SystemExit(main())
