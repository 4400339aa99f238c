"""Folders of runs: lines, settings, marks, a profile and a trace say anything; some of the files are no files."""

import copy
import gzip
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import hostile_runs
from fuzzing.target import Files, Parts, RefusedError, Special, Target, command
from fuzzing.verdict import fault

from collectives.texts import shown
from mpitrain.cli import main
from mpitrain.job.config import of_run
from mpitrain.job.elastic.lease import read_lease
from mpitrain.job.elastic.supervisor.folder import RunFolder
from mpitrain.job.record.files import marks
from mpitrain.job.record.files.folder_lock import Holder
from mpitrain.job.record.files.lines import LinesFile, is_evaluated
from mpitrain.job.record.trace import request
from mpitrain.view.trace.drawn import Drawn

LINES = ("metrics.jsonl", "ranks.jsonl", "events.jsonl")
OBJECTS = ("profile.json", ".lock", ".done", ".alive", ".launch", ".lease", ".trace")
TEXTS = ("config.toml", "failure.txt")
TRACE = "traces/step-00000001.json.gz"


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**12)


ODD: list[Special] = [os.mkfifo, _sparse, lambda path: path.symlink_to("/dev/zero"), Path.mkdir]


def _lines() -> Parts:
    """The lines of a run of two ranks, with summaries, events of most kinds, and a trace."""
    times = {name: [0.1, 0.11] for name in ("step_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "data_s")}
    metrics = [json.loads(line) for line in hostile_runs.STEPS.splitlines()]
    metrics[3] |= {"grad_norm/blocks.0": 0.5, "skipped": True, "loss": None}
    metrics.append({"step": 8, "time": 1.7e9 + 9, "heldout_loss": 2.5, "heldout_bits_per_byte": 1.0})
    figures = {**times, "memory_bytes": [10**8, 10**8]}
    ranks = [{"step": step, "ranks": figures, "gauges": {"cpu_percent": [50.0, 60.0]}} for step in range(1, 9)]
    ranks += [{"step": 9, "num_ranks": 70, "summary": {"step_s": [0.1, 0.2, 0.3, 4]}}]
    time = hostile_runs.BEGIN["time"]
    events = [
        hostile_runs.BEGIN,
        {"time": time, "event": "save", "step": 4, "path": "checkpoints/step-4", "cost_s": 0.5, "background": False},
        {"time": time, "event": "spike", "step": 5, "what": {"loss": {"value": 9.0, "median": 1.0}}, "skipped": True},
        {"time": time, "event": "straggler", "rank": 1, "host": "h2", "step": 6, "cost_s": 1.0, "factor": 1.5, "words": "slow"},
        {"time": time, "event": "rewind", "to_step": 3, "cost_s": 1.0, "why": "a spike"},
        {"time": time, "event": "trace", "step": 7, "first": 6, "last": 7, "path": "traces/step-00000001.json.gz"},
        {"time": time, "event": "failure", "rank": 0, "host": "h1", "problem": "boom"},
        {"time": time, "event": "end", "step": 8, "reason": "finished"},
    ]  # fmt: skip
    trace = [
        {"displayTimeUnit": "ms", "otherData": {}, "traceEvents": []},
        {"ph": "M", "name": "process_name", "pid": 1000, "args": {"name": "rank 0 on h1"}},
        {"ph": "M", "name": "thread_name", "pid": 1000, "tid": 100000, "args": {"name": "steps"}},
        {"ph": "X", "name": "step 1", "cat": "step", "pid": 1000, "tid": 100000, "ts": 0, "dur": 50.0},
        {"ph": "X", "name": "data", "cat": "phase", "pid": 1000, "tid": 100000, "ts": 1, "dur": 5.0},
        {"ph": "s", "id": 1, "name": "meets", "cat": "arrow", "pid": 1000, "tid": 100000, "ts": 2},
        {"ph": "f", "bp": "e", "id": 1, "name": "meets", "cat": "arrow", "pid": 1000, "tid": 100000, "ts": 3},
    ]
    return dict(zip((*LINES, TRACE), (metrics, ranks, events, trace), strict=True))


def _objects() -> Parts:
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 10**6)
    profile = {
        "parts": {"layers": {"blocks.0": {"forward": [0.5, 0.5]}, "data": {"own work": [0.1, 0.1]}}, "stages": [0, 0],
                  "num_steps": 5, "hidden": [0.0, 0.0], "cpu": [], "delay": []},
        "memory": [{"layers": {"blocks.0": kinds}, "others": {"other": 10**6}, "peak": 5 * 10**6, "moment": "there"}] * 2,
    }  # fmt: skip
    return {
        "profile.json": profile,
        ".lock": {"host": "h1", "pid": 1, "start": "7", "token": "a.b", "begun": 1.7e9, "place": "x", "job": "7"},
        ".done": {"launch": 1, "reason": "finished", "step": 8},
        ".alive": {"launch": 1, "phase": "training", "step": 8, "time": 1.7e9, "host": "h1", "pid": 1},
        ".launch": {"launch": 1, "supervisor": "s", "time": 1.7e9},
        ".lease": {"run": "abc", "number": 3},
        ".trace": {"id": "i", "steps": 3, "time": 1.7e9, "timeout_s": 9.0, "state": "asked", "path": "", "problem": ""},
    }


class RunFolderTarget(Target):
    errors = (ValueError, OSError)

    def make(self, rng: Random) -> Parts:
        texts = {"config.toml": hostile_runs.SETTINGS.encode(), "failure.txt": b"2026\nboom\n"}
        parts = {**_lines(), **texts}
        return copy.deepcopy(parts | _objects() if rng.random() < 0.7 else parts)

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        if rng.random() < 0.05:
            return {**parts, rng.choice(list(parts)): rng.choice(ODD)}
        return super().mutate(rng, parts)

    def wrap(self, rng: Random, parts: Parts) -> Files:
        files: Files = {}
        for name, part in parts.items():
            if callable(part) or isinstance(part, bytes):
                files[f"run/{name}"] = part
                continue
            rows = part if isinstance(part, list) and name not in OBJECTS else [part]
            lines = [json.dumps(row).encode() for row in rows]
            if name == TRACE:
                head = (lines[0] if lines else b"").removesuffix(b"]}")
                data = gzip.compress(head + b"\n" + b",\n".join(lines[1:]) + b"\n]}\n", mtime=0)
            else:
                data = b"\n".join(lines) + b"\n"
            files[f"run/{name}"] = data
        return files

    def passes(self, files: Files) -> bool:
        """Whether each line of the record is JSON, and the trace is packed."""
        try:
            for name in (f"run/{name}" for name in (*LINES, TRACE)):
                content = files[name]
                if isinstance(content, bytes):
                    for line in [] if name.endswith(".gz") else content.splitlines():
                        json.loads(line)
                    if name.endswith(".gz"):
                        gzip.decompress(content)
        except (ValueError, OSError, EOFError, RecursionError, zlib.error):
            return False
        return True

    def read(self, folder: Path) -> None:
        run, other = folder / "run", folder.with_name("output")
        hostile_runs.usual(other)
        refused: list[Exception] = []

        def doing(act: Callable[[], object]) -> None:
            try:
                act()
            except (RefusedError, ValueError, OSError) as error:
                refused.append(error)

        doing(lambda: command(main, ["watch", run, "--once"]))
        doing(lambda: command(main, ["report", run, "--out", folder / "x.html"]))
        doing(lambda: command(_answer, ["diff", run, other]))
        doing(lambda: command(main, ["profile", run]))
        doing(lambda: of_run(run / "config.toml"))
        doing(lambda: Drawn(run / TRACE))  # `trace --draw` without the picture, which takes matplotlib half a second
        doing(lambda: read_lease(run))
        doing(lambda: is_evaluated(run / LINES[0], 8))
        doing(lambda: LinesFile(run / LINES[0], steps_done=4).close())
        doing(lambda: _read_marks(run))
        if refused:
            raise next((error for error in refused if fault(error, self.errors)), refused[0])


def _read_marks(run: Path) -> None:
    """What the supervisor, `watch` and `trace` read of the marks."""
    for mark in (
        marks.read_alive(run),
        marks.read_done(run, 1),
        request.read(run),
        Holder(run).is_gone(),
        marks.last_launch(run),
    ):
        str(mark).encode()
    assert isinstance(marks.is_left_behind(run), bool)
    folder = RunFolder(run)
    folder.sign_of_life()
    folder.break_lock(marks.read_alive(run))
    report = folder.report_text()
    assert shown(report, lines=True) == report


def _answer(words: list[str]) -> int:
    """`diff`, of which the exit code 1 is an answer."""
    code = main(words)
    return 0 if code == 1 else code


TARGET = RunFolderTarget()
