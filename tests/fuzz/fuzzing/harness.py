"""Runs a target's inputs in a worker, which it watches: no input may hang it, end it, or make it grow.

An input that does so, or that is answered wrongly, is kept in a folder, and is named with the command that makes it again.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzzing import memory
from fuzzing.worker import UNTOUCHED

MAX_GROWN_BYTES = 500 << 20
MAX_FAULTS = 10
START_S = 120.0  # to import torch on a busy machine, and to read the sound inputs
GRACE_S = 5.0  # for the stacks of a hang
_LOOK_S = 0.01


class EndedError(Exception):
    """The worker has ended, or was ended, with an input."""


class Worker:
    """A process that reads many inputs, in a folder of its own. It starts when it is asked, also after its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, question: dict[str, Any], limit_s: float, max_bytes: int | None = None) -> dict[str, Any]:
        """The worker's answer. EndedError with the reason if it takes too long, ends, or needs more memory than `max_bytes`.

        Memory is that of the worker and its child processes together. "children_bytes" of the answer is at least what was seen here,
        because the worker does not know what a child needed that has ended.
        """
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # an end is found below
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        deadline, most_of_children = time.monotonic() + limit_s, 0
        while b"\n" not in self._buffer:
            if select.select([process.stdout], [], [], _LOOK_S)[0]:
                if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                    raise EndedError(self._cause())
                self._buffer += piece
                continue
            used = memory.now(process.pid)
            most_of_children = max(most_of_children, used.children)
            if time.monotonic() > deadline:
                self.close()
                raise EndedError(f"hangs: no answer within {limit_s:g} s, and no stacks{self._said()}")
            if max_bytes is not None and sum(used) > max_bytes:
                self.close()
                raise EndedError(f"grows: {sum(used) >> 20} MiB of memory; expected at most {max_bytes >> 20} MiB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "children_bytes" in answer:
            answer["children_bytes"] = max(answer["children_bytes"], most_of_children)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._buffer = None, b""

    def _start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "stderr", "wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fuzzing.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            )
        return self._process

    def _cause(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        said = self._said()
        if "Timeout (" in said:
            return f"hangs{said}"
        return f"ends by {signal.Signals(-code).name}{said}" if code < 0 else f"ends with exit code {code}{said}"

    def _said(self) -> str:
        text = (self.folder / "stderr").read_text(errors="replace")
        return f"; it said:\n{text[-6000:]}" if text else ""


@dataclass
class Report:
    """What came of a target's inputs."""

    name: str
    cases: int = 0
    passed: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    grown_bytes: int = 0
    seconds: float = 0.0
    missing: str = ""
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.missing:
            return f"{self.name}: not run: {self.missing}"
        return (
            f"{self.name}: {self.cases} inputs in {self.seconds:.0f} s, {self.passed / max(1, self.cases):.0%} past the outer check, "
            f"{self.refused / max(1, self.cases):.0%} refused, slowest {self.slowest_s:.2f} s, most {self.grown_bytes / 1e6:.0f} MB "
            f"above rest, {len(self.faults)} faults"
        )


def run(worker: Worker, module: str, seed: int, cases: range, kept: Path) -> Report:
    """Let the worker read inputs of the target in `module`, until `MAX_FAULTS` have failed, which are kept in the folder `kept`."""
    name = module.rpartition(".")[2]
    report, begun = Report(name), time.monotonic()
    sound: dict[str, Any] | None = None
    for case in cases:
        if sound is None or not worker.is_running:
            try:
                sound = worker.ask({"module": module, "seed": seed, "case": None}, START_S)
            except EndedError as end:
                sound = {"outcome": "failed", "message": str(end)}
            if sound["outcome"] == "missing":
                report.missing = sound["message"]
                break
            if sound["outcome"] != "read":
                report.faults.append(f"a sound input of {name} is not read: {sound['message']}")
                break
        report.cases += 1
        if problem := _one(worker, {"module": module, "seed": seed, "case": case}, sound, report):
            where = kept / f"{name}-seed-{seed}-case-{case}"
            shutil.copytree(worker.folder / UNTOUCHED, where, symlinks=True, copy_function=_copy_plain)
            again = f"python -m pytest tests/fuzz -k {name} --seed {seed} --case {case}"
            report.faults.append(f"case {case} of {name} {problem}\nkept in {where}; again: {again}")
            if len(report.faults) == MAX_FAULTS:
                break
    report.seconds = time.monotonic() - begun
    return report


def _one(worker: Worker, question: dict[str, Any], sound: dict[str, Any], report: Report) -> str | None:
    """The fault of one input, or None. `sound`: the answer to the sound inputs."""
    rest: int = sound["rest_bytes"]
    try:
        answer = worker.ask(question, sound["limit_s"] + GRACE_S, rest + MAX_GROWN_BYTES)
    except EndedError as end:
        return str(end)
    grown = answer["own_bytes"] + answer["children_bytes"] - rest
    report.passed += answer["passes"]
    report.refused += answer["outcome"] == "refused"
    report.slowest_s = max(report.slowest_s, answer["seconds"])
    report.grown_bytes = max(report.grown_bytes, grown)
    if answer["outcome"] == "failed":
        return f"raises {answer['message']}"
    if grown > MAX_GROWN_BYTES:
        worker.close()
        return f"grows by {grown >> 20} MiB; expected at most {MAX_GROWN_BYTES >> 20} MiB"
    return None


def _copy_plain(source: str, target: str) -> None:
    """Copy a plain file. A pipe and a sparse file of terabytes stay out: the case makes them again."""
    if os.path.isfile(source) and os.stat(source).st_size < 64 << 20:
        shutil.copyfile(source, target)
