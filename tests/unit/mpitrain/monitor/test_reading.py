"""The record of a run, read again: whole, torn, old, empty, and of many ranks."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.monitoring.recorded_runs import BEGAN, write_run
from mpitrain import files
from mpitrain.job.record.parsing import events as reading_events
from mpitrain.job.record.parsing import settings
from mpitrain.job.record.parsing.events import read_events
from mpitrain.job.record.parsing.readable import Readable
from mpitrain.view.reading.run import flat_settings, read_run
from mpitrain.view.reading.smoothing import smoothed


def test_the_whole_record(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "a", steps=120, ranks=3, skipped=[7], sources=["web"], layers_every=50, save_every=40, evaluate_every=60,
        events=[{"event": "new kind", "step": 30, "more": {"x": 1}}],
    )  # fmt: skip
    run = read_run(folder)
    assert run.name == "a" and run.num_ranks == 3 and run.notes == []
    assert run.steps.step.tolist() == list(range(1, 121))
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    written = [line for line in written if "heldout_loss" not in line]
    for name in ("loss", "step_s", "time", "loss/web", "skipped"):
        expected = [np.nan if line.get(name) is None else float(line[name]) for line in written]
        np.testing.assert_array_equal(run.steps.columns[name], expected)
    assert np.isnan(run.steps.columns["loss"][6]) and run.steps.columns["skipped"][6] == 1
    assert "grad_norm/head" not in run.steps.columns and "heldout_loss" not in run.steps.columns
    assert run.layers.step.tolist() == [50, 100] and np.isfinite(run.layers.columns["logit_entropy"]).all()
    assert run.evaluations.step.tolist() == [60, 120] and "heldout_bits_per_byte" in run.evaluations.columns
    assert run.ranks.columns["comm_s"].shape == (120, 3) and len(run.summaries) == 0
    ranks = [json.loads(line)["ranks"]["comm_s"] for line in (folder / "ranks.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(run.ranks.columns["comm_s"], np.float32(ranks))
    assert np.isnan(run.gauges.columns["gpu_watts"]).all() and (run.gauges.columns["cpu_percent"] > 50).all()
    assert [event.kind for event in run.events] == ["begin", "skip", "new kind", *["save"] * 3, "end"]
    assert run.events[2].fields["more"] == {"x": 1} and run.events[0].time == BEGAN
    assert run.settings["optim.lr"] == 0.003 and run.settings["resume"] == "auto"
    assert run.checkpoints == [40, 80, 120]


def test_many_ranks_have_summaries(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", steps=250, ranks=70))
    assert (
        run.num_ranks == 70 and run.ranks.step.tolist() == [100, 200] and run.ranks.columns["step_s"].shape == (2, 70)
    )
    busy = run.summaries.columns["backward_s"]
    assert busy.shape == (250, 4) and (busy[:, 0] <= busy[:, 1]).all() and (busy[:, 1] <= busy[:, 2]).all()
    assert run.ranks.columns["backward_s"][0].argmax() == busy[99, 3]


def test_torn_lines_and_steps_that_were_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ends within a line, and a number of ranks, a kind of value and a set of names changes."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 4.5, "note": "text", "new": [1]}\n{"step": 2, "loss": 4.0}\n{"step": 3, "loss": 3.5}\n'
        b'\xff\n[]\nnull\n{"step": "x"}\n{"step": 2, "loss": null, "later": 1}\n{"step": 3, "loss": 3.25}\n\n{"step": 4, "lo'
    )
    (folder / "ranks.jsonl").write_text(
        '{"step": 1, "ranks": {"step_s": [1, 2, 3], "odd": "x"}}\n{"step": 2, "ranks": {"step_s": [1, null]}}\n'
        '{"step": 3, "ranks": {"comm_s": [1, 2]}, "gauges": null}\n{"step": 4, "ran'
    )
    (folder / "events.jsonl").write_text('{"event": "failure", "time": "no time"}\n{"event": "sa')
    (folder / "config.toml").write_text("[optim\n")
    run = read_run(folder)
    assert run.steps.step.tolist() == [1, 2, 3] and len(run.evaluations) == 0
    np.testing.assert_array_equal(run.steps.columns["loss"], [4.5, np.nan, 3.25])
    np.testing.assert_array_equal(run.steps.columns["later"], [np.nan, 1, np.nan])
    assert "note" not in run.steps.columns and "new" not in run.steps.columns
    np.testing.assert_array_equal(run.ranks.columns["step_s"], [[1, 2, 3], [1, np.nan, np.nan], [np.nan] * 3])
    assert run.ranks.columns.keys() == {"step_s", "comm_s"} and run.num_ranks == 2
    assert [(event.kind, event.step) for event in run.events] == [("failure", None)]
    assert run.notes[0] == "metrics.jsonl has 4 damaged lines, which are left out"  # the torn last line is none of them
    assert len(run.notes) == 2 and "config.toml cannot be read" in run.notes[1]


def test_an_old_run_and_one_without_a_step(tmp_path: Path) -> None:
    old = read_run(write_run(tmp_path / "old", steps=30, is_old=True, save_every=10))
    assert len(old.steps) == 30 and len(old.ranks) == 0 and np.isnan(old.time).all() and old.num_ranks is None
    assert [event.step for event in old.events] == [10, 20, 30]
    none = read_run(write_run(tmp_path / "none", steps=0))
    assert len(none.steps) == 0 and len(none.time) == 0 and none.num_ranks == 2
    assert none.last("begin") is not None and none.last("save") is None


def test_an_event_without_a_step_belongs_to_the_last_step_before_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=50)
    at = read_run(folder).time[29] + 0.01
    with (folder / "events.jsonl").open("a") as file:
        stamp = np.datetime64(int(at * 1e6), "us")
        file.write(json.dumps({"time": f"{stamp}+00:00", "event": "relaunch"}) + "\n")
        file.write(json.dumps({"time": "2001-01-01T00:00:00+00:00", "event": "early"}) + "\n")
    assert [event.step for event in read_run(folder).events[-2:]] == [30, 0]


@pytest.mark.parametrize("beside", [[], ["node1"], ["node1", "x--y"], ["task-1"] * 3])
def test_a_secret_among_hosts_is_hidden(tmp_path: Path, beside: list[str]) -> None:
    """Also one that would be none if the names stood together."""
    secrets = ["hf_S3CRETabcdefghijklmnopqrstuvwxyz01", "x://u:p S3CRET@h", "API_KEY=S3CRET01"]
    for number, secret in enumerate(secrets):
        folder = tmp_path / str(number)
        folder.mkdir()
        begin = {"event": "begin", "hosts": [*beside, secret, "node2"], "environment": {"a": secret}, "device": secret}
        (folder / "events.jsonl").write_text(json.dumps(begin) + "\n")
        (event,) = read_events(folder)
        assert "S3CRET" not in str(event) and event["hosts"][:-2] == beside and event["hosts"][-1] == "node2"


@pytest.mark.parametrize("num_after", [0, 5, 6, 7, 500])
@pytest.mark.parametrize("length", [1, 300])
def test_the_last_begin_before_the_events_that_are_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_after: int, length: int
) -> None:
    """Within the bytes that are read, before them, and in the first ones of a record of which not all is looked through."""
    monkeypatch.setattr(reading_events, "MOST_EVENTS", 6)
    monkeypatch.setattr(reading_events, "_MOST_BYTES", 3000)
    monkeypatch.setattr(reading_events, "_MOST_EARLIER_BYTES", 50_000)
    begins = [{"event": "begin", "step": 0, "ranks": ranks, "hosts": ["a", "b"]} for ranks in (9, 2)]
    other = {"event": "save", "step": 1, "source": "begin", "words": "x" * length}
    lines = [begins[0], other, begins[1], *[other | {"step": step} for step in range(num_after)]]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    run = read_run(tmp_path)
    begin = run.last("begin")
    assert begin is not None and begin.fields["ranks"] == run.num_ranks == 2 and begin.fields["hosts"] == ["a", "b"]
    steps = [event.step for event in run.events if event.kind == "save"]
    assert steps[-5:] == [1, *range(num_after)][-5:] and len(run.events) <= 7


@pytest.mark.rest
def test_the_time_of_texts_is_bounded() -> None:
    """Of texts with words that secrets have, two million characters are searched; others are told by their length."""
    text = Readable()
    found = [text(f"{number:03} key API_KEY=S3CRET01 {'a' * 49_975}") for number in range(60)]
    told = [each for each in found if each.startswith("(a text of 50,000 characters, sha256 ")]
    assert told == found[40:] and "S3CRET" not in "".join(found) and len(set(told)) == 20
    assert text("b" * 500) == "b" * 500 and text("x" * 100_001).startswith("(a text of 100,001 ")
    assert text.all(["node1", "API_KEY=S3CRET01"])[0] == "node1" and "S3CRET" not in str(
        text.all(["node1", "API_KEY=S3CRET01"])
    )


def test_the_last_events_are_readable(tmp_path: Path) -> None:
    """Of more texts than are searched, the last ones are, for those are what `watch` and `report` tell."""
    line = '{"event": "new kind", "step": %d, "words": "s3://bucket/%s"}\n'
    (tmp_path / "events.jsonl").write_text("".join(line % (step, "a" * 9_000) for step in range(300)))
    events = read_events(tmp_path)
    assert [event["step"] for event in events] == list(range(300))
    assert events[0]["words"].startswith("(a text of 9,012 characters") and events[-1]["words"].startswith(
        "s3://bucket/aa"
    )
    whole = [event["words"].startswith("s3://") for event in events]
    assert whole == sorted(whole) and sum(whole) == 221


def test_a_long_list_of_settings_is_the_same_beside_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MOST_SEARCHED", 200_000)
    monkeypatch.setattr(settings, "_MOST_SEARCHED", 800_000)
    shards = [f"s3://bucket/{'a' * 10_000}{number}" for number in range(30)]
    short, long = (
        flat_settings(
            {"run": f"s3://bucket/{'x' * length}", "data": {"path": shards}, "log": {"project": "a key of b"}}
        )
        for length in (1, 30_000)
    )
    assert short["data.path"] == long["data.path"] and short["data.path"][-1].startswith("(a text of")
    assert short["log.project"] == long["log.project"] == "a key of b" and short["run"] != long["run"]
    many = flat_settings({"data": {f"path{number}": shards[:15] for number in range(9)}})
    assert many["data.path0"] == shards[:15] and "s3://" not in str(many["data.path8"]), "in bounded time"


def test_long_texts_of_settings_are_compared(tmp_path: Path) -> None:
    found = []
    for letter in "ab":
        (tmp_path / letter).mkdir()
        (tmp_path / letter / "config.toml").write_text(f'[data]\ntokenizer = "{"x" * 200_000}{letter}"\n')
        found.append(read_run(tmp_path / letter).settings["data.tokenizer"])
    assert found[0] != found[1] and all(len(text) < 100 for text in found)


def test_a_folder_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"expected the folder of a run, with .* got a folder without them; give the folder that --run"
    ):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="got no such folder"):
        read_run(tmp_path / "none")


def test_means_over_neighbours() -> None:
    line = np.arange(50.0)
    np.testing.assert_allclose(smoothed(line, 7), line, atol=1e-12)  # a falling loss is not shifted
    line[20] = np.nan
    assert np.isnan(smoothed(line, 3)).nonzero()[0].tolist() == [20]
    spike = np.zeros(9)
    spike[4] = 3.0
    np.testing.assert_allclose(smoothed(spike, 1), [0, 0, 0, 1, 1, 1, 0, 0, 0])
    assert len(smoothed(np.zeros(0), 3)) == 0
