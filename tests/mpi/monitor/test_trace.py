"""Traces of real trainers: what is in the file, that nothing of it exists outside traced steps, and the clocks of hosts."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import Make, in_step
from torch.profiler import ProfilerActivity, profile
from trace_checks import Event, checked, end, tick

from collectives import Communicator
from collectives.diagnosis import record
from mpitrain.job.record.trace import clocks as of_hosts
from mpitrain.job.record.trace import request
from mpitrain.job.record.trace.clocks import Clocks
from mpitrain.job.record.trace.packing import read_trace
from mpitrain.job.record.trace.tracer import Tracer
from mpitrain.job.train.trainer import Trainer

SLEEP_S = 0.3  # more than a busy machine delays a rank


def on_row(events: Sequence[Event], name: str, pid: int) -> list[Event]:
    tids = {each["tid"] for each in events if each["name"] == "thread_name" and each["args"]["name"] == name}
    return [each for each in events if each.get("tid") in tids and each["pid"] == pid and each["ph"] == "X"]


def values(trainer: Trainer) -> list[bytes]:
    """The parameters bit for bit, and the losses of the steps."""
    trainer.comm.barrier()
    losses = [json.loads(line)["loss"] for line in trainer.run.metrics.read_text().splitlines()]
    return [json.dumps(losses).encode(), *(bytes(param.detach().numpy().data) for param in trainer.model.parameters())]


def has_traces_of_a_trace(trainer: Trainer, tracer: Tracer | None = None) -> bool:
    """Whether something of a trace exists now: a profiler, hooks, or a record without a limit."""
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in trainer.model.modules())
    found = {
        (tracer or trainer.observers.tracer).is_tracing,
        torch.autograd._profiler_enabled(),  # type: ignore[attr-defined]
        record._make is not record.Entry,
        hooks > trainer.hooks_before,  # type: ignore[attr-defined]
        trainer.monitor.clock.on_lap is not None,
    }
    assert len(found) == 1, "all of it, or nothing"
    return found.pop()


def watched(trainer: Trainer, seen: list[bool]) -> Trainer:
    """Notes in `seen` for each step whether something of a trace exists within it."""
    modules = trainer.model.modules()
    trainer.hooks_before = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)  # type: ignore[attr-defined]
    train = trainer.passes.train

    def then_look(*args: Any) -> float:
        total = train(*args)
        seen.append(has_traces_of_a_trace(trainer))
        return total

    trainer.passes.train = then_look  # type: ignore[method-assign]
    return trainer


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", [[], ["--parallel.pipeline", "2", "--train.accumulate", "2"]])
def test_a_trace_of_a_run(comm: Communicator, make: Make, shared_tmp: Path, layout: list[str]) -> None:
    """Steps 4 to 5 by the settings, and before them step 2 by a request. The last rank is slow in step 5."""
    plain = make("plain", 6, "--model.layers", "2", *layout)
    plain.fit()
    if comm.rank == 0:
        (shared_tmp / "traced").mkdir()
        request.ask(shared_tmp / "traced", 1, timeout_s=600)
    comm.barrier()
    seen: list[bool] = []
    trainer = watched(make("traced", 6, "--model.layers", "2", "--log.trace-steps", "4:5", *layout), seen)
    slow = comm.size - 1
    in_step(trainer, 5, lambda: time.sleep(SLEEP_S if comm.rank == slow else 0))
    trainer.fit()
    assert seen == [False, True, False, True, True, False]
    assert values(trainer) == values(plain), "a trace changes no bit"
    files = sorted((shared_tmp / "traced/traces").iterdir())
    assert [file.name for file in files] == ["step-00000002.json.gz", "step-00000004.json.gz"]
    answer = request.read(shared_tmp / "traced")
    assert answer is not None
    assert (answer.state, Path(answer.path)) == ("done", files[0])

    events = checked(files[1], comm.size)
    about = read_trace(files[1])["otherData"]
    assert about["arrows_left_out"] == 0
    if comm.num_nodes == 1:
        assert about["clock_error_us"] == about["corrected_us"] == 0, "ranks of one host have one clock"
    for pid in range(1000, 1000 + comm.size):
        steps = on_row(events, "steps", pid)
        assert [each["name"] for each in steps if each["cat"] == "step"] == ["step 4", "step 5"]
        phases = {"data", "optimizer", "check", *(() if layout else ("forward", "backward"))}
        assert {each["name"] for each in steps if each["cat"] == "phase"} == phases
        blocks = {each["name"] for each in on_row(events, "layers", pid) if "ward blocks." in each["name"]}
        assert len(blocks) == (2 if layout else 4), blocks  # forward and backward
        operators = on_row(events, "operators", pid)
        assert any(each["name"].startswith("aten::") for each in operators)
        # operators lie within the steps, to the error of the profiler's clock
        begin, stop = tick(steps[0]["ts"]), max(end(each) for each in steps)
        assert all(begin - 5000 <= tick(each["ts"]) <= stop + 5000 for each in operators)
        actions = [each["name"] for each in on_row(events, "pipeline", pid)]
        stage = (pid - 1000) // (comm.size // 2)
        expected = [f"{kind} stage {stage} micro {micro}" for kind in "FB" for micro in range(2)] * 2
        assert sorted(actions) == sorted(expected if layout else [])
        # A norm goes over the ranks of a stage, then over the stages: another stage waits for a rank that waits for the slow one.
        awaited = {f"wait for rank {rank}" for rank in (range(comm.size) if layout else [slow])}
        waits = [each for each in on_row(events, "communication", pid) if each["name"] in awaited]
        longest = max((each["dur"] for each in waits), default=0) * 1e-6
        assert (longest > SLEEP_S / 2) == (pid != 1000 + slow), "the others wait for the slow rank"
    arrows = [each for each in events if each["ph"] == "s"]
    assert {each["pid"] for each in arrows} >= {1000 + slow}


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
def test_a_run_that_ends_first_writes_what_there_is(comm: Communicator, make: Make, shared_tmp: Path) -> None:
    trainer = make("short", 3, "--log.trace-steps", "3:9", "--model.layers", "3")
    trainer.fit()
    comm.barrier()
    file = shared_tmp / "short/traces/step-00000003.json.gz"
    assert file.stat().st_size <= 100_000 * comm.size, (
        "the size follows from the layers, which are those of the default model"
    )
    events = checked(file, comm.size)
    assert [each["name"] for each in on_row(events, "steps", 1000) if each["cat"] == "step"] == ["step 3"]
    assert not trainer.observers.tracer.is_tracing


@pytest.mark.ranks(2)
def test_a_full_disk_stops_no_run(
    comm: Communicator, make: Make, shared_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if comm.rank == 0:
        (shared_tmp / "run").mkdir()
        (shared_tmp / "run/traces").write_text("a file where the folder should be")
    comm.barrier()
    trainer = make("run", 3, "--log.trace-steps", "1:1")
    trainer.fit()
    assert trainer.step == 3
    if comm.rank == 0:
        assert "step-00000001.json.gz cannot be written" in capsys.readouterr().out


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_profiler_of_the_user_stops_no_run(
    comm: Communicator, make: Make, shared_tmp: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    """One rank has a profiler of its own, which runs already, or begins and ends in a traced step. A later request gets a trace."""
    trainer = make("run", 7, "--log.trace-steps", "1:3")
    mine = profile(activities=[ProfilerActivity.CPU])
    if comm.rank == 1 and when == "before":
        mine.start()
        in_step(trainer, 4, mine.stop)
    elif comm.rank == 1:
        in_step(trainer, 2, mine.start)
        in_step(trainer, 2, mine.stop)
    if comm.rank == 0:
        in_step(trainer, 5, lambda: request.ask(trainer.run.folder, 1, timeout_s=600))
        in_step(trainer, 5, lambda: setattr(trainer.observers.tracer._requests, "_looked_at", -1e9))
    trainer.fit()
    assert trainer.step == 7
    assert record._make is record.Entry and trainer.monitor.clock.on_lap is None
    if comm.rank == 0:
        lines = [line for line in capsys.readouterr().out.splitlines() if "another profiler of torch" in line]
        assert len(lines) == 1 and "[rank 1 of 2]" in lines[0], lines
        assert [file.name for file in (shared_tmp / "run/traces").iterdir()] == ["step-00000006.json.gz"]


@pytest.mark.ranks(2)
def test_a_request_hears_of_a_profiler_of_the_user(comm: Communicator, make: Make, shared_tmp: Path) -> None:
    tracer = tracer_of(make("run", 1), shared_tmp)
    if comm.rank == 0:
        request.ask(shared_tmp, 2, timeout_s=600)
    comm.barrier()
    tracer.before_step(1)
    tracer.agree(comm.broadcast_object(tracer.wanted()))
    with profile(activities=[ProfilerActivity.CPU]):
        tracer.before_step(2)
    assert not tracer.is_tracing
    answer = request.read(shared_tmp)
    assert comm.rank or (answer is not None and answer.state == "done" and "runs already" in answer.problem)


@pytest.mark.ranks(2)
def test_a_return_to_an_earlier_step_voids_a_trace(comm: Communicator, make: Make, shared_tmp: Path) -> None:
    tracer = tracer_of(make("run", 1), shared_tmp, traced=(3, 4))
    if comm.rank == 0:
        request.ask(shared_tmp, 1, timeout_s=600)
    comm.barrier()
    tracer.before_step(1)
    tracer.agree(comm.broadcast_object(tracer.wanted()))
    assert tracer.after_step(1) is None
    tracer.before_step(2)
    assert tracer.is_tracing
    tracer.went_back()
    answer = request.read(shared_tmp)
    assert comm.rank or (answer is not None and answer.state == "done" and "went back" in answer.problem)
    for steps in ((2, 3), (3, 4)):  # the second return is within step 4
        for step in steps:
            tracer.before_step(step)
            assert tracer.is_tracing == (step > 2)
            written = tracer.after_step(step)
        if steps == (2, 3):
            tracer.before_step(4)
            tracer.went_back()
            assert not tracer.is_tracing
    comm.barrier()
    events = checked(shared_tmp / "traces/step-00000003.json.gz", comm.size)
    assert [each["name"] for each in on_row(events, "steps", 1000)] == ["step 3", "step 4"]
    assert comm.rank or (written is not None and (written.first, written.last) == (3, 4))


@pytest.mark.ranks(2)
def test_a_trace_that_cannot_begin_leaves_nothing(
    comm: Communicator, make: Make, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is none of the trace, such as a loss of ranks, comes from its last collective."""
    trainer = make("run", 1)
    tracer = tracer_of(trainer, shared_tmp, traced=(1, 1))

    def lose_ranks(*args: Any) -> None:
        assert torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        raise ConnectionError("a rank is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Communicator, "barrier", lose_ranks)
        with pytest.raises(ConnectionError):
            tracer.before_step(1)
    assert not has_traces_of_a_trace(watched(trainer, []), tracer)


def tracer_of(trainer: Trainer, folder: Path, traced: tuple[int, int] | None = None) -> Tracer:
    """A Tracer in a loop of the test's own."""
    return Tracer(
        folder, trainer.comm, model=trainer.model, clock=trainer.monitor.clock, passes=trainer.passes, traced=traced
    )


def wrong_clock(rank: int) -> Any:
    """The clock of a host that is seconds off and drifts by 50 ppm a rank."""
    zero = time.monotonic()
    return lambda time_s: time_s + rank * (1.0 + 50e-6 * (time_s - zero))


@pytest.mark.ranks(2, 4)
def test_clocks_of_hosts(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank as a host: the short form of `python -m mpitrain bench clocks`, which has the bound of the best sample.

    Here ranks share cores, so a round may have long trips alone.
    """
    monkeypatch.setattr(of_hosts, "EVERY_S", 60.0)
    read = wrong_clock(comm.rank)
    clocks = Clocks(comm, read, host=comm.rank)
    for _ in range(8):
        clocks.measure()
        time.sleep(0.02)
    clocks.measure(always=False)  # too early, so no messages
    assert len(clocks.samples) == (0 if comm.rank == 0 else 8)
    line = clocks.line()
    times = clocks.samples[0].at + np.linspace(0, 0.2, 20) if comm.rank else np.zeros(1)
    # The inverse of the wrong clock, which rank 0 does not have: its times are true.
    true = np.array([invert(read, each) for each in times])
    bounds = [each.error for each in clocks.samples] or [0.0]
    assert line.error == min(bounds)
    assert np.abs(line(times) - true).max() <= 2 * max(bounds) if comm.rank else line(1.0) == 1.0


def invert(read: Any, shown: float) -> float:
    """The time at which the clock shows `shown`."""
    time_s = shown
    for _ in range(5):
        time_s -= read(time_s) - shown
    return time_s


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
def test_a_trace_over_wrong_clocks(comm: Communicator, make: Make, shared_tmp: Path) -> None:
    """The clocks are seconds apart, and no arrow points back in time. All ranks begin the first step within the truth."""
    trainer = make("run", 4)
    trainer.observers.tracer = Tracer(
        trainer.run.folder, comm, model=trainer.model, clock=trainer.monitor.clock, passes=trainer.passes, traced=(2, 4),
        read=wrong_clock(comm.rank), host=comm.rank,
    )  # fmt: skip
    trainer.fit()
    comm.barrier()
    file = shared_tmp / "run/traces/step-00000002.json.gz"
    events, about = checked(file, comm.size), read_trace(file)["otherData"]
    assert about["arrows_left_out"] == 0
    assert 0 < about["clock_error_us"] < 100_000
    begins = [on_row(events, "steps", 1000 + rank)[0]["ts"] for rank in range(comm.size)]
    assert min(begins) < 1
    assert max(begins) < 0.5e6, "the clocks are seconds apart, the ranks are not"
