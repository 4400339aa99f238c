"""`python -m ckpt`: what it prints, and that it needs neither MPI nor torch."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import printed

import ckpt
from ckpt.cli import main


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2):
        tensors = {
            "model/w": np.arange(24, dtype="f4").reshape(4, 6) + step,
            "model/b": np.ones(3, ml_dtypes.bfloat16),
            "step": np.array(step),
        }
        ckpt.save(tmp_path / f"step-{step}", tensors, comm=None, meta={"step": step, "text": "x" * 300})
    return tmp_path


def test_ls(folder, capsys):
    (folder / "step-1" / "rank-00000.h5").unlink()
    lines = printed(capsys, "ls", folder).splitlines()
    assert lines[0].split() == ["NAME", "STEP", "TENSORS", "SIZE", "AGE", "STATE"]
    assert lines[1].split()[:3] == ["step-1", "1", "3"] and "incomplete: rank-00000.h5 is missing" in lines[1]
    assert lines[2].split()[:3] == ["step-2", "2", "3"] and lines[2].rstrip().endswith("complete")
    found = json.loads(printed(capsys, "ls", folder, "--json"))
    assert [(c["name"], c["step"], c["complete"]) for c in found] == [("step-1", 1, False), ("step-2", 2, True)]
    assert found[1]["bytes"] == sum(f.stat().st_size for f in (folder / "step-2").iterdir())
    assert len(json.loads(printed(capsys, "ls", folder / "step-2", "--json"))) == 1


def test_show(folder, capsys):
    out = printed(capsys, "show", folder / "step-1")
    assert "3 tensors, 110 B" in out and "  step: 1\n" in out and "x" * 300 not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["model/", "2", "tensors", "102", "B"] in rows
    assert ["model/w", "float32", "4", "x", "6", "96", "B", "1", "rank-00000.h5"] in rows
    assert ["model/b", "bfloat16", "3", "6", "B", "1", "rank-00000.h5"] in rows
    assert ["step", "int64", "scalar", "8", "B", "1", "rank-00000.h5"] in rows
    # a folder of checkpoints: its newest
    found = json.loads(printed(capsys, "show", folder, "--json"))
    assert found["path"] == str(folder / "step-2") and found["meta"] == {"step": 2, "text": "x" * 300}
    assert found["tensors"]["model/w"] == {
        "dtype": "float32",
        "shape": [4, 6],
        "bytes": 96,
        "axes": None,
        "blocks": [{"file": "rank-00000.h5", "offset": [0, 0], "shape": [4, 6]}],
    }


def test_show_tensor(folder, capsys):
    out = printed(capsys, "show", folder / "step-1", "model/w")
    assert "model/w: float32 (4, 6), 96 B" in out and "rank-00000.h5: [0:4, 0:6]" in out
    assert "[[ 1.,  2.,  3.,  4.,  5.,  6.]," in out
    assert json.loads(printed(capsys, "show", folder, "step", "--json"))["shape"] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ls", "nowhere"], "No such file or directory: 'nowhere'"),
        (["show", "nowhere"], "nowhere does not exist"),
        (["show", "."], "has no manifest.jsonl"),
        (["show", "step-1", "model/v"], "has no tensor 'model/v'; nearest: model/w"),
    ],
)
def test_errors_are_one_line(folder, capsys, monkeypatch, args, message):
    monkeypatch.chdir(folder)
    if args[1] == ".":
        (folder / "empty").mkdir()
        monkeypatch.chdir("empty")
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ckpt: ") and message in err and err.count("\n") == 1


@pytest.mark.rest
def test_reading_needs_neither_mpi_nor_torch(folder):
    """In a process of its own: saving, loading and the command line alone must import neither."""
    script = f"""
import sys
import tempfile
import numpy as np
import ckpt
from ckpt.cli import main

ckpt.save({str(folder / "alone")!r}, {{"x": np.arange(3)}}, comm=None)
ckpt.load({str(folder / "alone")!r}, {{"x": np.empty(3, int)}})
for args in (["ls", {str(folder)!r}], ["show", {str(folder)!r}], ["show", {str(folder)!r}, "x"]):
    assert main(args) == 0
found = {{"mpi4py", "torch"}} & {{name.partition(".")[0] for name in sys.modules}}
assert not found, found
"""
    env = {**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "ckpt", "ls", str(folder)], env=env, capture_output=True, text=True, check=True
    )
    assert "step-2" in done.stdout


def test_a_run_stands_for_its_checkpoints(tmp_path, capsys):
    ckpt.save(tmp_path / "checkpoints" / "step-00000003", {"x": np.ones(2)}, comm=None)
    assert main(["ls", str(tmp_path)]) == 0
    assert "step-00000003" in capsys.readouterr().out
    assert main(["show", str(tmp_path)]) == 0
    assert str(tmp_path / "checkpoints" / "step-00000003") in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_folder_of_runs_says_how_to_name_one(tmp_path, capsys, words):
    (tmp_path / "0-other").mkdir()
    for run in ("a", "b"):
        ckpt.save(tmp_path / run / "checkpoints" / "step-00000003", {"x": np.ones(2)}, comm=None)
    assert main(["ls", str(tmp_path), *words]) == 0
    said = capsys.readouterr()
    assert said.err == f"no checkpoints in {tmp_path}: name one of the runs in it, such as {tmp_path}/a\n"
    assert not words or said.out == "[]\n"


def test_a_folder_of_runs_beside_one_that_others_have_closed(capsys):
    """As `ls /tmp` may be. Root would look into it, so the look is another user's."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "a" / "checkpoints").mkdir(parents=True)
        (folder / "closed").mkdir(mode=0o000)
        folder.chmod(0o755)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            assert main(["ls", place]) == 0
        finally:
            if is_root:
                os.seteuid(0)
            (folder / "closed").chmod(0o700)
        assert capsys.readouterr().err == f"no checkpoints in {place}: name one of the runs in it, such as {place}/a\n"
