"""What the watch shows: the states of a run, any size of the screen, ranks, events, and a run that goes on."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.monitoring.recorded_runs import Slow, write_run
from mpitrain.job.record.files.events import write_event
from mpitrain.job.record.files.marks import Marks
from mpitrain.view.report import report_command
from mpitrain.view.watch.charts import Range, Screen
from mpitrain.view.watch.view import split, view
from mpitrain.view.watch.watched import RECENT, Watched


def seen(folder: Path, *, width: int = 100, height: int | None = None, **more: Any) -> list[str]:
    run = Watched(folder)
    run.update()
    return [line.plain for line in view(run, Screen(width, height, **more), Range())]


def write_steps(folder: Path, first: int, last: int, *, ended_s: float = 0.0, step_s: float = 0.5) -> None:
    """Append steps to metrics.jsonl, the last of which ended so many seconds ago."""
    folder.mkdir(exist_ok=True)
    now = time.time() - ended_s
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            at = now - (last - step) * step_s
            file.write(
                json.dumps({"step": step, "time": at, "loss": 4.0, "tokens_per_s": 1e3, "step_s": step_s}) + "\n"
            )


def running(folder: Path) -> None:
    write_steps(folder, 1, 50)
    (folder / ".lock").touch()
    (folder / "config.toml").write_text("[train]\nsteps = 250\n")


def silent(folder: Path) -> None:
    write_steps(folder, 1, 50, ended_s=75.0)
    (folder / ".lock").touch()


def slow_steps(folder: Path) -> None:
    """75 s are no long time for steps of 30 s."""
    write_steps(folder, 1, 50, ended_s=75.0, step_s=30.0)
    (folder / ".lock").touch()


def killed(folder: Path) -> None:
    silent(folder)
    old = time.time() - 3600
    os.utime(folder / ".lock", (old, old))


def ended(reason: str) -> Callable[[Path], None]:
    def end(folder: Path) -> None:
        running(folder)
        (folder / ".lock").unlink()
        Marks(folder).done(reason, 50)  # type: ignore[arg-type]

    return end


def failed(folder: Path) -> None:
    running(folder)
    (folder / ".lock").unlink()
    (folder / "failure.txt").write_text("2026-11-26 01:20:00\nrank 1 on n2 has run out of memory\nmore\n")


def resumed_after_a_failure(folder: Path) -> None:
    """A report of a hang that has ended."""
    failed(folder)
    old = time.time() - 60
    os.utime(folder / "failure.txt", (old, old))
    (folder / ".lock").touch()


def killed_on_this_host(folder: Path) -> None:
    write_steps(folder, 1, 50, ended_s=15.0)
    script = (
        "import os, pathlib, sys; from mpitrain.job.record.files.folder_lock import FolderLock; "
        "FolderLock(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, folder], timeout=60).returncode == 9
    os.utime(folder / ".lock", (time.time() - 15,) * 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "waiting: there is no such folder yet"),
        (lambda folder: folder.mkdir(), "waiting for a job: none trains in this folder"),
        (lambda folder: (folder.mkdir(), (folder / ".lock").touch()), "starting: no step yet"),
        (running, "running"),
        (silent, "no step since 1:[12]."),
        (slow_steps, "running"),
        (killed, "no sign of life since 1:00:..: was the job killed[?]"),
        (
            killed_on_this_host,
            "ended without a regular end: process [0-9]+ on .* has ended without releasing .*/run/.lock",
        ),
        (ended("finished"), "finished"),
        (ended("stopped"), "stopped"),
        (failed, "failed: rank 1 on n2 has run out of memory"),
        (resumed_after_a_failure, "running"),
        (lambda folder: write_steps(folder, 1, 3), "ended: no job trains in this folder"),
        (lambda folder: write_run(folder, steps=3), "finished"),  # the last event
    ],
)
def test_states(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    folder = tmp_path / "run"
    make(folder)
    assert re.fullmatch(words, seen(folder, width=300)[0].removeprefix(str(folder)).strip())


def test_a_long_state_keeps_the_path_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small").mkdir()
    failed(Path("small/x"))
    Path("small/x/failure.txt").write_text("time\n" + "rank 1 on n2 has run out of memory " * 3)
    lines = seen(Path("small/x"), width=40)
    assert lines[0] == "small/x  failed: rank 1 on n2 has run"
    assert lines[1] == "out of memory rank 1 on n2 has run out"


def test_progress_and_the_time_left(tmp_path: Path) -> None:
    running(tmp_path / "run")
    bar = seen(tmp_path / "run", width=60)[1]
    assert bar.startswith("step 50/250  ━━━━") and bar.endswith("─  20%  1:40 left") and len(bar) == 60


def test_the_time_between_two_jobs_is_no_time_of_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_steps(folder, 1, 20, ended_s=5000.0)
    write_event(folder, "begin", step=20)
    write_steps(folder, 21, 50, ended_s=-30.0)
    (folder / "config.toml").write_text("[train]\nsteps = 250\n")
    (folder / ".lock").touch()
    assert seen(folder)[1].endswith("  1:40 left")


@pytest.mark.parametrize("width", [20, 40, 71, 80, 133])
@pytest.mark.parametrize("height", [3, 10, 24, 50])
def test_every_screen_is_filled_and_no_line_is_longer(busy_run: Path, width: int, height: int) -> None:
    lines = seen(busy_run, width=width, height=height, has_keys=True)
    assert len(lines) == height and max(map(len, lines)) <= width
    assert height < 24 or any("┤" in line for line in lines), "the curves stay longest"


@pytest.fixture(scope="module")
def busy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(
        tmp_path_factory.mktemp("a") / "run", steps=300, ranks=8, skipped=[40], spikes=[70], slow=Slow(3, "cpu", 200, 300), gpu=True,
        throttled=[5], save_every=100, evaluate_every=50, events=[{"event": "new kind", "step": 290, "size": 3}],
    )  # fmt: skip


def test_a_run_in_words(busy_run: Path) -> None:
    text = "\n".join(lines := seen(busy_run, width=120))
    assert "slow at step 225: rank 3 on node0 takes 1.40 times as long as the other ranks" in text
    of_ranks = {line.split()[0]: line for line in lines if line[1:].startswith(" node0 ")}
    assert list(of_ranks) == list("01234567")
    assert of_ranks["3"].endswith("slow: cpu") and of_ranks["5"].endswith("throttled")
    busy_ms = {rank: int(line.split()[3]) for rank, line in of_ranks.items()}
    assert busy_ms["3"] > 1.3 * busy_ms["2"]
    assert "GPU %    W  °C" in text
    assert "step 40  skipped: loss not finite, gradient norm not finite" in text
    assert "step 70  spike: loss " in text and "new kind: size 3" in text
    assert "step 300  saved step-00000300 (0.02 s)" in text and "checkpoint at step 300, 0:0" in text
    assert "● held-out" in text and "held-out 2." in text
    assert "NVIDIA H100" in text and "8 ranks on 1 host" in text
    narrow = seen(busy_run, width=44)
    assert any(line.startswith("3 node0") and line.endswith("slow: cpu") for line in narrow), "the cause stays"


def test_without_unicode(busy_run: Path) -> None:
    lines = seen(busy_run, width=100, height=40, ascii_only=True, has_colour=False)
    assert all(line.isascii() for line in lines) and any(":" in line and "|" in line for line in lines)


def test_many_ranks_show_the_worst(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=250, ranks=128, slow=Slow(77, "data", 150, 250))
    lines = seen(folder, height=40)
    first = next(at for at, line in enumerate(lines) if line.startswith("rank "))
    assert lines[first + 1].startswith("77 node9") and lines[first + 1].endswith("slow: data")
    assert any("more ranks (of step 200), which are less busy" in line for line in lines)
    assert any(line.startswith("step ") and "most on rank" in line for line in lines)


@pytest.mark.parametrize(
    "how",
    [{"steps": 0}, {"steps": 1}, {"steps": 5, "skipped": range(1, 6)}, {"steps": 30, "is_old": True, "torn": True}],
)
def test_short_empty_and_old_runs(tmp_path: Path, how: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "run", **how)
    for height in (None, 24):
        lines = seen(folder, height=height)
        assert any(line.startswith(f"step {how['steps']}/{how['steps']}") for line in lines) == (how["steps"] > 0)


def test_the_run_goes_on_and_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    running(folder)
    run = Watched(folder)
    run.update()
    write_steps(folder, 51, 60)
    run.update()
    assert (
        run.last is not None and run.last["step"] == 60 and run.series["loss"].points()[0].tolist() == [*range(1, 61)]
    )
    assert 0 <= (run.silent_s() or 0) < 5
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:40]))
    write_steps(folder, 41, 42)
    run.update()
    assert [line["step"] for line in run.recent] == [*range(1, 43)]
    assert run.series["loss"].points()[0].tolist() == [*range(1, 43)]


def test_files_in_another_encoding_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """UTF-16 of Windows, and Latin-1 in the report of a failure."""
    folder = write_run(tmp_path / "run", steps=3)
    names = ("metrics.jsonl", "ranks.jsonl")
    texts = {name: (folder / name).read_text() for name in names}
    for name in names:
        (folder / name).write_text(texts[name], "utf-16")
    (folder / "failure.txt").write_bytes(b"caf\xe9 rank 1 died\n")
    told = [f"{name} has {texts[name].count(chr(10))} damaged lines, which are left out" for name in names]
    run = Watched(folder)
    for _ in range(2):
        run.update()
        assert run.notes == told and run.status().words == "failed: caf\\xe9 rank 1 died"
    assert report_command.main([str(folder)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "damaged" in line] == [
        f"run: {line}" for line in told
    ]
    for name in names:
        (folder / name).write_text(texts[name])
    run.update()
    assert run.notes == [] and run.last is not None and run.last["step"] == 3


def test_a_file_that_cannot_be_read_is_named_and_read_later(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    events = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(b"\xff\n")
    (folder / "metrics.jsonl").rename(folder / "kept")
    (folder / "metrics.jsonl").mkdir()
    run = Watched(folder)
    run.update()
    text = "\n".join(line.plain for line in view(run, Screen(100), Range()))
    assert "metrics.jsonl cannot be read: it is a folder; expected a regular file" in text
    assert "events.jsonl has 1 damaged line, which is left out" in text
    (folder / "metrics.jsonl").rmdir()
    (folder / "kept").rename(folder / "metrics.jsonl")
    (folder / "events.jsonl").write_bytes(events)
    run.update()
    assert run.notes == [] and run.last is not None and run.last["step"] == 3 and len(run.events) == 2


def test_long_runs_take_little_memory(tmp_path: Path) -> None:
    write_steps(tmp_path / "run", 1, 20_000)
    run = Watched(tmp_path / "run")
    run.update()
    steps, _ = run.series["loss"].points()
    assert len(run.recent) == RECENT and RECENT / 2 <= len(steps) <= RECENT
    assert (run.first_step, steps[-1], run.last["step"] if run.last else 0) == (1, 20_000, 20_000)
    text = "\n".join(line.plain for line in view(run, Screen(100), Range(size=100, back=50)))
    assert "19,900" in text and "20,000" not in text.split("ms a step")[0].split("tokens/s  mean")[-1]


def test_a_long_session_keeps_its_begin(tmp_path: Path) -> None:
    """Of many events after it the last ones are held, and it is still known when another one is the last."""
    folder = tmp_path / "run"
    folder.mkdir()
    begin, save = {"event": "begin", "step": 0, "ranks": 2, "hosts": ["a", "b"]}, {"event": "save", "step": 1}
    file = folder / "events.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in (begin, *[save] * 1200)))
    run = Watched(folder)
    run.update()
    assert run.hosts == ["a", "b"] and run.session[0]["event"] == "begin" and len(run.session) == 1001
    file.write_text(file.read_text() + json.dumps(begin | {"hosts": ["c", "b"]}) + "\n")
    run.update()
    assert run.hosts == ["c", "b"] and len(run.session) == 1


def test_ranges_of_steps() -> None:
    everything = Range()
    assert everything.span(1, 1000) == (1, 1000)
    closer = everything.zoomed(1000, closer=True)
    assert closer.span(1, 1000) == (501, 1000) and closer.span(1, 1010) == (511, 1010), "it follows the run"
    earlier = closer.moved(1000, later=False)
    assert earlier.span(1, 1000) == (251, 750)
    assert earlier.moved(1000, later=True) == closer and closer.moved(1000, later=True) == closer
    assert closer.zoomed(1000, closer=False) == everything and everything.zoomed(1000, closer=False) == everything
    assert everything.zoomed(5, closer=True).span(1, 5) == (1, 5)
    for _ in range(20):
        closer = closer.zoomed(1000, closer=True)
    assert closer.size == 20


def test_a_lost_rank_is_not_shown(tmp_path: Path) -> None:
    run = Watched(write_run(tmp_path / "lost", steps=210, ranks=4, lost_after=200))
    run.update()
    assert [rank.number for rank in run.ranks.all()] == [0, 1, 2]
    run = Watched(write_run(tmp_path / "few", steps=210, ranks=64, lost_after=200))  # below the ranks of summaries
    run.update()
    assert len(run.ranks.all()) == 63 and not run.ranks.is_summarized and run.ranks.summary("step_s") is None


def test_the_parts_of_a_step_sum_up() -> None:
    lines = [
        {"step": 1, "step_s": 1.0, "data_s": 0.1, "forward_s": 0.2, "comm_s": 0.3},
        {"step": 2, "step_s": 2.0, "comm_s": 0.5},
    ]
    parts = split(lines)
    assert parts == pytest.approx(
        {"data": 0.05, "forward": 0.1, "backward": 0, "optimizer": 0, "communication": 0.4, "checks": 0, "rest": 0.95}
    )
    assert split([{"step": 1}]) == {}
