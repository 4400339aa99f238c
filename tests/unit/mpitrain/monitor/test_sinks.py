"""The sinks over a run, a kill and its continuation, read back by the tools that read them."""

import csv
import json
import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain.files import make_folder
from mpitrain.job.config import ConfigError
from mpitrain.job.record.sinks import (
    About,
    Sink,
    check_sinks,
    csv_file,
    make_sinks,
    outside,
    program,
    wandb_rows,
    wandb_run,
)
from mpitrain.job.record.trace import session

SETTINGS = {
    "run": "runs/a",
    "train.batch": 8,
    "optim.lr": 1e-3,
    "train.elastic": False,
    "log.sinks": ("csv",),
    "log.on_event": None,
}


def opened(name: str, folder: Path, steps_done: int = 0) -> Sink:
    (sink,) = make_sinks((name,))
    sink.open(about(folder, steps_done))
    return sink


def about(folder: Path, steps_done: int) -> About:
    return About(folder, steps_done, SETTINGS, "a project")


def figures(step: int, life: int = 1) -> dict[str, float | None]:
    """`life`: the number of the start that writes them, so that one can tell a step that was done again."""
    return {
        "time": 1.7e9 + step,
        "loss": 1 / (3 * step),
        "step_s": life + step / 100,
        "grad_norm": None if step == 2 else 0.1,
    }


# CSV


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_a_csv_file_is_whole_after_each_call(tmp_path: Path) -> None:
    sink = opened("csv", tmp_path)
    assert rows(tmp_path) == []
    sink.step(1, {"loss": 0.1, "tokens": 5, "skipped": True})
    assert rows(tmp_path) == [{"step": "1", "loss": "0.1", "tokens": "5", "skipped": "1"}]
    sink.step(2, {"loss": math.nan, "tokens": None, "loss/a, b": 1e-300})
    assert [row["loss/a, b"] for row in rows(tmp_path)] == ["", "1e-300"]
    sink.evaluation(2, {"heldout_loss": 0.125, "time": 1.5})
    sink.evaluation(2, {"heldout_loss": 0.5, "time": 2.5})
    assert [row["time"] for row in rows(tmp_path)] == ["", "1.5"]
    sink.evaluation(2, {"heldout_loss": 0.25})
    sink.step(3, {"loss": 1 / 3})
    found = rows(tmp_path)
    assert [(row["step"], row["loss"], row["heldout_loss"]) for row in found] == [
        ("1", "0.1", ""), ("2", "", "0.25"), ("3", repr(1 / 3), ""),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="without line breaks"):
        sink.step(4, {"a\nb": 1.0})
    sink.close()
    assert rows(tmp_path) == found


@pytest.mark.parametrize("torn", [b"", b"5", b"5,0.5", b"5,0.5\n", b"\0\0\0\n", b",,,\n"])
def test_a_csv_file_goes_on_where_the_run_does(tmp_path: Path, torn: bytes) -> None:
    sink = opened("csv", tmp_path)
    for step in range(1, 5):
        sink.step(step, figures(step))
    sink.close()
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(torn)
    sink = opened("csv", tmp_path, steps_done=4)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3", "4"], "only what is torn is cut"
    sink.leave()
    sink.open(about(tmp_path, 2))  # the same object, as a user's after a rewind
    sink.evaluation(2, {"heldout_loss": 0.5})
    for step in (3, 4):
        sink.step(step, figures(step, life=2))
    sink.close()
    found = rows(tmp_path)
    assert [(row["step"], row["heldout_loss"]) for row in found] == [("1", ""), ("2", "0.5"), ("3", ""), ("4", "")]
    assert [float(row["step_s"]) // 1 for row in found] == [1, 1, 2, 2]


def test_a_long_csv_file_is_read_and_rewritten_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "BLOCK_BYTES", 16)
    sink = opened("csv", tmp_path)
    for step in range(1, 30):
        sink.step(step, {"loss": step / 2, f"new{step // 10}": 1.0})
    sink.close()
    sink = opened("csv", tmp_path, steps_done=25)
    sink.step(26, {"loss": 1.5, "other": 2.0})
    sink.close()
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [str(step) for step in range(1, 27)]
    assert all(
        row["loss"] == str(step / 2) and row[f"new{step // 10}"] == "1.0" for step, row in enumerate(found[:25], 1)
    )
    assert found[25] == {"step": "26", "loss": "1.5", "new0": "", "new1": "", "new2": "", "other": "2.0"}


def test_files_of_sinks_that_no_run_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read line by line, whatever their size."""
    path, rows_of_wandb = tmp_path / "metrics.csv", tmp_path / "wandb.rows"
    for file in (path, rows_of_wandb):
        with file.open("wb") as made:
            made.truncate(3 << 30)
    tracemalloc.start()
    try:
        sink = opened("csv", tmp_path, steps_done=3)
        sink.step(4, {"loss": 1.0})
        sink.close()
        with pytest.raises(OSError, match="it has a line of more than"):
            wandb_rows.WandbRows(rows_of_wandb, 0)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert path.read_text() == "step,loss\n4,1.0\n"
    path.write_bytes(b"step,loss\n1,2.0\n2,\xff\n3,1.0\n")
    opened("csv", tmp_path, steps_done=3).close()
    assert path.read_text() == "step,loss\n1,2.0\n"
    odd = f"[[[[\n7\n[1e999]\n{{}}\n[4, 0.5, null, -1]\n[4, 0.5, null, {1 << 62}]\n[true, 0.5, null]\n[4, [], null]\n[4, 0.5, nul"
    rows_of_wandb.write_text(f"[1, 0.5, null]\n[2, 0.5, null, 1]\n[3, 0.5, null]\n{odd}")
    its = wandb_rows.WandbRows(rows_of_wandb, 1)
    assert [its.has(step, {"loss": 0.5}) for step in (1, 2, 3, 4)] == [False, True, True, False]
    assert (its.next_number, rows_of_wandb.read_text()) == (3, "[2, 0.5, null, 1]\n[3, 0.5, null, 2]\n")
    its.close()
    monkeypatch.setattr(wandb_rows, "_MOST_ROWS", 1)
    with pytest.raises(OSError, match="it has more than 1 rows after step 1"):
        wandb_rows.WandbRows(rows_of_wandb, 1)


def test_a_signal_to_all_processes_of_a_step_does_not_end_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's, also before the program has its handlers: its imports take seconds."""
    script = "import sys; sys.exit(0 if '[\"end\"]' in sys.stdin.read() else 3)"
    monkeypatch.setattr("collectives.programs.python", lambda module: [sys.executable, "-c", script, module])
    sink = opened("wandb", tmp_path)
    assert isinstance(sink, outside.Outside) and sink._program is not None
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(sink._program.pid, signum)
    sink.close()


def test_rows_of_wandb_are_numbered_over_all_starts(tmp_path: Path) -> None:
    """Also those of starts that have added none, that go back, and that have a step again with another loss."""
    path, numbers = tmp_path / "wandb.rows", []
    for steps_done, steps in ((0, (1, 2, 3)), (3, ()), (3, (4,)), (2, (3, 4, 5)), (9, ()), (9, (10,))):
        its = wandb_rows.WandbRows(path, steps_done)
        for step in steps:
            if not its.has(step, {"loss": steps_done + step, "grad_norm": 1.0}):
                numbers.append(its.next_number)
                its.add(step, {"loss": steps_done + step})
        its.close()
    assert numbers == list(range(8))


def test_a_folder_of_a_sink_is_no_link(tmp_path: Path) -> None:
    """Nothing is written elsewhere. The folder of the run may be a link of its user."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "stored").mkdir()
    run = tmp_path / "run"
    run.symlink_to("stored")
    link = run / "tensorboard"
    for target in ("../elsewhere", tmp_path / "elsewhere", "../nothing"):
        link.symlink_to(target)
        with pytest.raises(OSError, match=f"{link}: it is a link; expected a folder, or none"):
            opened("tensorboard", run)
        with pytest.raises(OSError, match="it is a link"):
            make_folder(link)
        link.unlink()
    for name in ("wandb", ".wandb"):
        (run / name).symlink_to("../elsewhere")
        with pytest.raises(OSError, match=f"{name}: it is a link; expected a folder, or none"):
            wandb_run.WandbRun(about(run, 0), "id")
        (run / name).unlink()
    (run / "traces").symlink_to("../elsewhere")
    assert "it is a link" in str(session._write(run / "traces/step-00000001.json.gz", [b"trace"]))
    assert not any((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "nothing").exists()
    opened("tensorboard", run).close()
    assert any((tmp_path / "stored/tensorboard").iterdir())


def test_a_csv_file_without_a_whole_header_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,lo")
    sink = opened("csv", tmp_path, steps_done=3)
    sink.step(4, {"loss": 0.5})
    sink.close()
    assert rows(tmp_path) == [{"step": "4", "loss": "0.5"}]


# TensorBoard


def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    sink = opened("tensorboard", tmp_path)
    for step in range(1, 7):
        sink.step(step, figures(step))
        if step % 2 == 0:
            sink.evaluation(step, {"heldout_loss": step / 4})
    sink.event({"event": "spike", "step": 3, "score": 9.5})
    sink.close()
    (first,) = (tmp_path / "tensorboard").iterdir()
    with first.open("ab") as file:  # a kill within the record of a step
        file.write(first.read_bytes()[-70:-20])
    sink.open(about(tmp_path, 4))
    long = {f"grad_norm/layers.{layer}.a_long_name_of_a_layer": float(layer) for layer in range(100)}
    for step in range(5, 9):
        sink.step(step, {**figures(step, life=2), **long, "huge": 1e300})
    sink.close()

    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"loss", "time/step_s", "grad_norm", "heldout_loss", "huge", *long}
    steps = list(range(1, 9))
    loss = read.Scalars("loss")
    assert [(each.step, each.wall_time) for each in loss] == [(step, 1.7e9 + step) for step in steps]
    assert [each.value for each in loss] == [struct.unpack("f", struct.pack("f", 1 / (3 * step)))[0] for step in steps]
    assert [each.value // 1 for each in read.Scalars("time/step_s")] == [1] * 4 + [2] * 4
    assert [math.isnan(each.value) for each in read.Scalars("grad_norm")] == [step == 2 for step in steps]
    assert [(each.step, each.value) for each in read.Scalars("heldout_loss")] == [(2, 0.5), (4, 1.0)]
    assert [each.value for each in read.Scalars("huge")] == [math.inf] * 4
    assert all([each.value for each in read.Scalars(name)] == [value] * 4 for name, value in long.items())
    (spike,) = read.Tensors("events/spike")
    assert spike.step == 3 and json.loads(spike.tensor_proto.string_val[0]) == {
        "event": "spike",
        "step": 3,
        "score": 9.5,
    }
    assert [each.step for each in read.Tensors("settings")] == [0, 4]
    assert "| train.batch | `8` |" in read.Tensors("settings")[0].tensor_proto.string_val[0].decode()
    assert read.SummaryMetadata("settings").plugin_data.plugin_name == "text"
    metadata = read.SummaryMetadata("_hparams_/session_start_info")
    hparams = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    assert (hparams["train.batch"].number_value, hparams["train.elastic"].bool_value) == (8, False)
    assert (hparams["run"].string_value, hparams["log.on_event"].string_value) == ("runs/a", "")


# Tools in a program of their own

KILLED = """
import os, sys
from pathlib import Path
from mpitrain.job.record.sinks import About, make_sinks
(sink,) = make_sinks((sys.argv[1],))
sink.open(About(Path(sys.argv[2]), 0, {"train.batch": 8, "log.on_event": None}, "a project"))
for step in (1, 2, 3):
    sink.step(step, {"time": 1.7e9, "loss": 1 / (3 * step), "step_s": 1.0, "grad_norm": None})
sink.step(4, {"time": 1.7e9, "loss": 0.125})
sink.event({"event": "spike", "step": 3})
os._exit(9)
"""


def live_twice(name: str, folder: Path) -> None:
    """Write steps 1 to 4 in a process that is killed, and steps 3 to 5 in this one: 3 with the same loss, 4 with another."""
    subprocess.run(
        [sys.executable, "-c", KILLED, name, str(folder)], env=dict(os.environ) | {"PYTHONPATH": ":".join(sys.path)}
    )
    sink = opened(name, folder, steps_done=2)
    (program,) = (each for each in vars(sink).values() if isinstance(each, subprocess.Popen))
    assert b"OMPI_" not in Path(f"/proc/{program.pid}/environ").read_bytes(), "a program with these variables is a rank"
    for step in (3, 4, 5):
        sink.step(step, figures(step, life=2))
    sink.evaluation(5, {"heldout_loss": 0.5})
    sink.close()


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run. Its tools keep all below the test's folder."""
    monkeypatch.setattr(outside, "_END_S", 120.0)  # on a busy machine the imports alone may take 20 s
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")  # the tools' programs are no ranks
    for variable in ("TRACKIO_DIR", "HF_HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: a log of LevelDB after a header of 7 bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # the end of a block
            at += left
            continue
        crc, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + size]
        assert crc == zlib.crc32(part, zlib.crc32(bytes([kind])))
        record += part
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.parametrize("kept", ["exp.v2", "a b~(1)+é", "x" * 128])
def test_an_id_that_wandb_takes_stays(tmp_path: Path, kept: str) -> None:
    (tmp_path / "wandb.id").write_text(f"{kept}\n")
    assert program._kept_id(tmp_path / "wandb.id") == kept


@pytest.mark.parametrize("kept", ["", "a/b", "a:b", "it's", "x" * 129, "a\x1b[2J", "a\nb"])
def test_another_id_is_replaced_with_a_word(tmp_path: Path, kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wandb.id").write_text(kept)
    new = program._kept_id(tmp_path / "wandb.id")
    assert program._kept_id(tmp_path / "wandb.id") == new and new.isalnum()
    (said,) = capsys.readouterr().out.splitlines()
    assert f"wandb.id: expected an id of 1 to 128 characters without :;,#?/', got {kept!r:.200}; takes {new}" in said


@pytest.mark.rest
def test_wandb_has_every_figure_offline(offline: Path) -> None:
    (offline / "wandb.id").write_text("exp.v2\n")
    live_twice("wandb", offline)
    from wandb.proto import wandb_internal_pb2 as messages

    lives: list[list[dict[str, Any]]] = []
    numbers: list[int] = []
    ids, configs, alerts, exits, axes = set(), [], [], [], set()
    for path in sorted((offline / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        lives.append([])
        for text in records(path):
            record = messages.Record.FromString(text)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
                configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            elif kind == "history":
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                numbers.append(row["_step"])
                lives[-1].append({name: value for name, value in row.items() if not name.startswith("_")})
            elif kind == "alert":
                alerts.append(record.alert.title)
            elif kind == "exit":
                exits.append(record.exit.exit_code)
            elif kind == "metric":
                axes.add(record.metric.step_metric)
    assert ids == {("exp.v2", "a project", "run")}
    assert configs[0]["train"] == {"batch": 8}
    assert [[row["step"] for row in life] for life in lives] == [[1, 2, 3, 4], [4, 5, 5]]
    assert numbers == list(range(7)), "W&B takes no row with the number of an earlier one"
    assert lives[0][1]["loss"] == 1 / 6 and math.isnan(lives[0][1]["grad_norm"])
    assert lives[1][1] == {"step": 5, "loss": 1 / 15, "time/step_s": 2 + 5 / 100, "grad_norm": 0.1}
    assert lives[1][2] == {"step": 5, "heldout_loss": 0.5}
    assert (alerts, exits) == (["run: spike"], [1, 0])
    assert "step" in axes


@pytest.mark.rest
def test_trackio_has_each_step_once(offline: Path) -> None:
    live_twice("trackio", offline)
    name = f"run-{(offline / 'trackio.id').read_text().strip()}"
    (path,) = (offline.parent / "TRACKIO_DIR").glob("*.db")
    with sqlite3.connect(path) as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        alerts = database.execute("SELECT title FROM alerts").fetchall()
    database.close()
    assert [(run, step) for run, step, _ in found] == [(name, step) for step in (1, 2, 3, 4, 5, 5)]
    assert [json.loads(text)["loss"] for _, _, text in found[:5]] == [1 / (3 * step) for step in range(1, 6)]
    assert json.loads(found[2][2]) == {"loss": 1 / 9, "time/step_s": 2 + 3 / 100, "grad_norm": 0.1}
    assert json.loads(found[5][2]) == {"heldout_loss": 0.5}
    assert alerts == [("run: spike",)]


@pytest.mark.rest
def test_a_sink_that_is_left_holds_up_nothing_and_passes_on_what_it_has(offline: Path) -> None:
    """A run goes back twice while trackio still starts; each time more waits for it than a pipe takes (64 kB)."""
    (sink,) = make_sinks(("trackio",))
    long = {f"grad_norm/layers.{layer}.a_long_name_of_a_layer": float(layer) for layer in range(100)}
    programs = []
    for life, (steps_done, last) in enumerate([(0, 25), (20, 45), (40, 42)], 1):
        sink.open(about(offline, steps_done))
        programs += [each for each in vars(sink).values() if isinstance(each, subprocess.Popen)]
        for step in range(steps_done + 1, last + 1):
            sink.step(step, {**figures(step, life), **long})
        if life < 3:
            sink.leave()
            with (offline / "foreign").open("wb") as foreign:  # it may have the number of the pipe
                sink.step(99, long)
                sink.event({"event": "spike", "step": 99})
            assert foreign.closed and not (offline / "foreign").read_bytes()
    assert all(program.poll() is None for program in programs), "nothing has waited for a program"
    sink.close()
    assert all(program.poll() == 0 for program in programs)
    (path,) = (offline.parent / "TRACKIO_DIR").glob("*.db")
    with sqlite3.connect(path) as database:
        found = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    database.close()
    lives = [(step, json.loads(text)["time/step_s"] // 1) for step, text in found]
    assert lives == [(step, 1 + (step > 20) + (step > 40)) for step in range(1, 43)]


@pytest.mark.rest
def test_a_tool_that_fails_says_so_at_a_later_step(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SERVER_URL", "no-url")
    sink = opened("trackio", offline)
    until = time.monotonic() + 120

    def steps() -> None:
        while time.monotonic() < until:
            sink.step(1, {"loss": 1.0})
            time.sleep(0.01)

    with pytest.raises(RuntimeError, match=r"trackio: .* code 1: ValueError: .*got: 'no-url'; .*trackio.log says more"):
        steps()
    sink.close()


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r'log.sinks: wandb is not installed here; expected pip install "mpitrain\[wandb\]"'
    ):
        check_sinks(("csv", "wandb"))
    check_sinks(("csv", "tensorboard"))
