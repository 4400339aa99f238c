"""What a run records, and what it passes on to sinks and callbacks."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from checkpoints import tensors
from run_events import faults
from small_trainers import Make

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.job.record.adding import Added, Moment
from mpitrain.job.record.files import ranks
from mpitrain.job.record.parsing.events import read_events
from mpitrain.job.record.sinks import About, Figures


@pytest.fixture(autouse=True)
def nothing_added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("figures", {}), ("sinks", []), ("callbacks", [])):
        monkeypatch.setattr(Added, name, empty)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.rest
def test_the_parts_of_a_step_and_the_figures_of_all_ranks(comm: Communicator, make: Make) -> None:
    micro = () if comm.size > 3 else ("--train.accumulate", "2")  # of 12 rows
    trainer = make("run", 30, *micro)
    trainer.fit()
    comm.barrier()
    steps, of_ranks = lines(trainer.run.folder / "metrics.jsonl"), lines(trainer.run.folder / "ranks.jsonl")
    assert [line["step"] for line in steps] == [line["step"] for line in of_ranks] == list(range(1, 31))
    assert all(tuple(line["ranks"]) == ranks.FIGURES for line in of_ranks)
    assert all(len(values) == comm.size for line in of_ranks for values in line["ranks"].values())
    parts = ("data_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "check_s")
    shares = []
    for line, others in zip(steps, of_ranks, strict=True):
        assert all(line[part] >= 0 for part in parts) and line["forward_s"] > 0 < line["backward_s"]
        shares.append(sum(line[part] for part in parts) / line["step_s"])
        assert [others["ranks"][part][0] for part in parts] == [round(line[part], 5) for part in parts]
        assert sum(others["ranks"]["rows"]) == 12
    assert median(shares) > 0.7 and max(shares) <= 1  # a step takes some ms here
    assert steps[-1]["time"] > steps[0]["time"] > 1.7e9
    events = read_events(trainer.run.folder)
    assert [event["event"] for event in events] == ["begin", "save", "end"]
    assert events[0]["ranks"] == comm.size == len(events[0]["hosts"]) and events[0]["tokens_per_step"] == 12 * 16


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_a_resume_shows_each_step_once(comm: Communicator, make: Make) -> None:
    first = make("run", 20, "--checkpoint.every", "10")
    first.fit()
    if comm.rank == 0:  # as if the job had been killed after step 20, before its save
        ckpt_of_20 = first.run.checkpoint(20)
        ckpt_of_20.rename(first.run.folder.with_name("away"))
    comm.barrier()
    again = make("run", 25, "--checkpoint.every", "10")
    again.fit()
    comm.barrier()
    for name in ("metrics.jsonl", "ranks.jsonl"):
        assert [line["step"] for line in lines(again.run.folder / name)] == list(range(1, 26)), name
    begins = [event["step"] for event in read_events(again.run.folder) if event["event"] == "begin"]
    assert begins == [0, 10]


class Opened(mpitrain.Sink):
    """Notes from which step the run begins or goes on, and the steps."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def open(self, about: About) -> None:
        self.calls.append(("open", about.steps_done))

    def step(self, step: int, figures: Figures) -> None:
        self.calls.append(step)

    def leave(self) -> None:
        self.calls.append("leave")

    def close(self) -> None:
        self.calls.append("close")


class FailsAtClose(mpitrain.Sink):
    """Fails at the end."""

    def close(self) -> None:
        raise OSError("no room")


@pytest.mark.ranks(1, 2)
def test_a_rewind_shows_each_step_once(comm: Communicator, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    opened = Opened()
    mpitrain.log(sink=FailsAtClose())
    mpitrain.log(sink=opened)
    trainer = make("run", 12, "--checkpoint.every", "4", "--train.max-rewinds", "1", "--log.sinks", "csv")
    loss, passes = trainer.passes._loss, trainer.passes  # type: ignore[attr-defined]
    bad = trainer.batches.train.next_sample(6)

    def poisoned(batch: Any) -> Any:
        return loss(batch) * (float("nan") if trainer.batches.train.next_sample(trainer.step) == bad else 1.0)

    passes._loss = poisoned  # type: ignore[attr-defined]
    trainer.fit()
    comm.barrier()
    folder = trainer.run.folder
    for name in ("metrics.jsonl", "ranks.jsonl"):
        assert [line["step"] for line in lines(folder / name)] == list(range(1, 13)), name
    with (folder / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 13))
    if comm.rank == 0:
        assert opened.calls == [("open", 0), 1, 2, 3, 4, 5, 6, "leave", ("open", 4), *range(5, 13), "close"]
        # It fails when the run goes back, and is not opened again.
        assert capsys.readouterr().out.count("FailsAtClose has failed") == 1
    assert [event["event"] for event in faults(folder)] == ["rewind", "sink"]


class Broken(mpitrain.Sink):
    """Fails at step 5."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.closed = 0

    def step(self, step: int, figures: Figures) -> None:
        self.seen.append(step)
        if step == 5:
            raise RuntimeError("the disk of this sink is full")

    def close(self) -> None:
        self.closed += 1


class Listens(mpitrain.Callback):
    """Notes all moments, and logs a figure."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, int]] = []

    def step(self, moment: Moment) -> None:
        self.moments.append(("step", moment.step))
        mpitrain.log({"my/rank": float(moment.comm.all_reduce(np.ones(1))[0])})

    def evaluation(self, moment: Moment) -> None:
        assert moment.figures["heldout_loss"] > 0
        self.moments.append(("evaluation", moment.step))

    def save(self, moment: Moment) -> None:
        assert moment.figures["path"].exists() and moment.model is not None
        self.moments.append(("save", moment.step))

    def end(self, moment: Moment) -> None:
        self.moments.append((moment.figures["reason"], moment.step))


@pytest.mark.ranks(1, 2)
def test_sinks_and_callbacks_change_no_number_and_stop_no_run(
    comm: Communicator, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make("plain", 10)
    plain.fit()
    broken, listens = Broken(), Listens()
    mpitrain.log(sink=broken)
    mpitrain.log(callback=listens)
    watched = make("watched", 10, "--train.eval-batches", "1", "--log.sinks", "csv", "tensorboard")
    watched.fit()
    comm.barrier()
    kept = ("step", "loss", "grad_norm", "lr")
    runs = [
        [[line[key] for key in kept] for line in lines(each.run.folder / "metrics.jsonl") if "loss" in line]
        for each in (plain, watched)
    ]
    assert runs[0] == runs[1]
    assert tensors(ckpt.latest(plain.run.checkpoints)) == tensors(ckpt.latest(watched.run.checkpoints))
    steps = [("step", step) for step in range(1, 11)]
    assert listens.moments == [*steps, ("evaluation", 10), ("save", 10), ("finished", 10)]
    logged = [line.get("my/rank") for line in lines(watched.run.folder / "metrics.jsonl") if "loss" in line]
    assert logged == [comm.size] * 10
    if comm.rank == 0:
        assert broken.seen == [1, 2, 3, 4, 5] and broken.closed == 1
        out = capsys.readouterr().out
        assert out.count("Broken has failed") == 1 and "the disk of this sink is full" in out
    (event,) = faults(watched.run.folder)
    assert event["event"] == "sink" and event["sink"] == "Broken" and "disk of this sink" in event["problem"]


class Fails(Listens):
    """Raises in step 3, on all ranks."""

    def step(self, moment: Moment) -> None:
        if moment.step == 3:
            raise ZeroDivisionError("my callback")

    def failure(self, moment: Moment) -> None:
        self.moments.append((str(moment.figures["error"]), moment.step))


class Told(mpitrain.Sink):
    """Notes the events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, event: Mapping[str, Any]) -> None:
        self.events.append(f"{event['event']} {event.get('problem', '')}".strip())


@pytest.mark.ranks(1, 2)
def test_an_error_of_a_callback_ends_the_run(comm: Communicator, make: Make) -> None:
    fails, told = Fails(), Told()
    mpitrain.log(sink=told)
    mpitrain.log(callback=fails)
    with pytest.raises(ZeroDivisionError, match="my callback"):
        make("run", 5).fit()
    assert fails.moments == [("my callback", 3)]
    assert told.events == (["begin", "failure ZeroDivisionError: my callback"] if comm.rank == 0 else [])
