"""The parts of a trace that look into torch: operators on the clock of time.monotonic, and the spans of modules."""

import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.record.trace.clocks import Line
from mpitrain.job.record.trace.events import Slice, nested
from mpitrain.job.record.trace.profiler import Profiler, operators_of
from mpitrain.job.record.trace.spans import Spans
from mpitrain.models.gpt import GPT
from mpitrain.models.sizes import GPTConfig


def test_operators_have_the_times_of_the_monotonic_clock() -> None:
    x = torch.ones(300, 300)
    profiler = Profiler()
    before = time.monotonic()
    x @ x
    after = time.monotonic()
    found, error_s = profiler.stop()
    assert 0 < error_s < 1e-3
    (product,) = [each for each in found if each.name == "aten::mm"]
    assert before - 1e-3 <= product.begun < product.ended <= after + 1e-3
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert not any("mpitrain" in each.name for each in found), "the marks are left out"


def test_another_profiler_of_torch_goes_first() -> None:
    """torch itself would end the first profile without a word, and kill the process at its export."""
    with profile(activities=[ProfilerActivity.CPU]) as other:
        with pytest.raises(RuntimeError, match="runs already"):
            Profiler()
        torch.ones(3) + 1
    assert "aten::add" in {each.name for each in other.events() or ()}, "it is not disturbed"
    profiler = Profiler()
    with profile(activities=[ProfilerActivity.CPU]) as other:
        torch.ones(3) + 1
    assert "aten::add" in {each.name for each in other.events() or ()}
    with pytest.raises(RuntimeError, match="began within the traced steps"):
        profiler.stop()
    profiler.close()
    profiler = Profiler()
    (torch.ones(3) + 1).sum()
    assert "aten::add" in {each.name for each in profiler.stop()[0]}, "a later trace works"


def test_what_a_trace_leaves_out() -> None:
    """Kineto's names for the kinds of events, of which a GPU's come from no test here."""
    given = [
        ("cpu_op", "aten::mm", 3.0),
        ("cpu_op", "aten::view", 0.2),
        ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 5.0),
        ("kernel", "gemm", 0.3),
        ("gpu_memcpy", "Memcpy HtoD", 4.0),
        ("cuda_runtime", "cudaLaunchKernel", 6.0),
        ("cuda_runtime", "cudaStreamSynchronize", 600.0),
        ("user_annotation", "mpitrain: clock", 1.0),
    ]
    events = [{"cat": cat, "name": name, "ts": 10.0, "dur": us, "tid": 7, "ph": "X"} for cat, name, us in given]
    found = list(operators_of(events, Line(offset=1)))
    assert [each.name for each in found] == ["aten::mm", "gemm", "Memcpy HtoD", "cudaStreamSynchronize"]
    assert [each.is_on_gpu for each in found] == [False, True, True, False]
    assert found[0].begun == 1 + 10e-6


def test_spans_of_a_step() -> None:
    """A phase of the clock and a layer's forward each make a span; nothing is left after `close`."""
    model = GPT(GPTConfig(vocab=300, context=8, layers=1, heads=2, width=8))
    clock = StepClock(lambda: 0.0)
    spans = Spans(model, clock, has_stages=False)
    tokens = torch.arange(8)[None]
    loss = model(tokens, tokens)
    clock.lap("forward")
    loss.backward()
    clock.lap("backward")
    spans.close()
    model(tokens, tokens).backward()
    clock.lap("forward")
    assert [each.name for each in spans.phases] == ["forward", "backward"]
    layers = ("embedding", "blocks.0", "head")
    assert list(dict.fromkeys(each.name for each in spans.layers))[:3] == [f"forward {name}" for name in layers]
    assert {f"backward {name}" for name in layers} <= {each.name for each in spans.layers}
    first, last = spans.phases
    assert all(first.begun <= each.begun <= each.ended <= last.ended for each in spans.layers)
    slices = nested([Slice(each.name, "layer", int(each.begun * 1e7), int(each.ended * 1e7)) for each in spans.layers])
    assert len(slices) == len(spans.layers)
