"""Operators and kernels of a rank, from torch.profiler, on the clock of `time.monotonic`.

torch.profiler has a clock of its own (from the processor's counter). Marks tie the two clocks together: a mark begins between two
readings of `time.monotonic`. The line through the tightest marks maps the times; half the width of a mark bounds the error.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.job.record.trace.clocks import Line, Sample, fit

_MARK = "mpitrain: clock"
_NUM_MARKS = 20
_LEAST_US = 0.5
"""Shorter operators are left out: a third of all, and a thousandth of the time."""
_LEAST_CALL_US = 20.0
"""Of a call of CUDA's runtime: launches are left out, waits stay."""
_OPERATORS, _ON_GPU, _CALLS = "cpu_op", ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
_ENDED = "another profiler of torch began within the traced steps; a trace needs steps without it"
_WRAPPER = "autograd::engine::evaluate_function: "  # around the operator of the same name


class Operator(NamedTuple):
    """An operator or a kernel. Times are seconds of `time.monotonic`; `thread`: the system's id, or the number of the GPU's stream."""

    name: str
    begun: float
    ended: float
    thread: int
    is_on_gpu: bool


class Profiler:
    """torch.profiler from the construction to `stop` or `close`.

    A process has one profile at a time. torch lets a second one begin: it ends the first one without a word, and the process dies when
    the first one is exported. So there is a RuntimeError if another profile runs at the begin, or has begun since.
    """

    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if _is_profiling():
            raise RuntimeError("another profiler of torch runs already; a trace needs steps without it")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its first start prints lines about itself
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # There is one cycle. Without `acc_events` torch 2.11 warns that it drops the events of earlier ones.
        self._profile: Any = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._marks = self._mark()

    def stop(self) -> tuple[list[Operator], float]:
        """End the profile. Returns the operators, and the error of their times in seconds. RuntimeError if another one has ended it."""
        if not _is_profiling():
            raise RuntimeError(_ENDED)
        self._marks += self._mark()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            written = json.loads(file.read_bytes())
        events = [each for each in written["traceEvents"] if each.get("ph") == "X"]
        line = self._line([each["ts"] for each in events if each["name"] == _MARK])
        return list(operators_of(events, line)), line.error

    def close(self) -> None:
        """End the profile, and drop it."""
        if _is_profiling():
            with contextlib.suppress(RuntimeError):
                self._profile.stop()

    def _mark(self) -> list[tuple[float, float]]:
        from torch.profiler import record_function

        marks = []
        for _ in range(_NUM_MARKS):
            before = time.monotonic()
            mark = record_function(_MARK)
            mark.__enter__()
            marks.append((before, time.monotonic()))
            mark.__exit__(None, None, None)
        return marks

    def _line(self, seen_us: list[float]) -> Line:
        """From the profiler's times in us to `time.monotonic`."""
        if len(seen_us) != len(self._marks):
            raise RuntimeError(_ENDED)
        samples = [
            Sample(us * 1e-6, (before + after) / 2 - us * 1e-6, (after - before) / 2)
            for us, (before, after) in zip(sorted(seen_us), self._marks, strict=True)
        ]
        halves = samples[:_NUM_MARKS], samples[_NUM_MARKS:]
        return fit(
            [sample for half in halves for sample in sorted(half, key=lambda each: each.error)[: _NUM_MARKS // 4]]
        )


def _is_profiling() -> bool:
    """Whether a profile of torch runs in this process. torch has no public query."""
    import torch

    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def operators_of(events: list[dict[str, Any]], line: Line) -> Iterator[Operator]:
    """What a trace keeps of the complete events of a profile. `line`: from their seconds to `time.monotonic`."""
    for each in events:
        category, name, us = each.get("cat"), each["name"], each.get("dur", 0.0)
        on_gpu = category in _ON_GPU
        if not (
            on_gpu
            or (category == _OPERATORS and us >= _LEAST_US and not name.startswith(_WRAPPER))
            or (category in _CALLS and us >= _LEAST_CALL_US)
        ):
            continue
        begun = line(each["ts"] * 1e-6)
        yield Operator(name, begun, begun + us * 1e-6, int(each["tid"]), on_gpu)
