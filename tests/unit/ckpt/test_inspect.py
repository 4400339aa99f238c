"""`python -m ckpt show --stats | --histogram`, `diff`, `verify`: what they print, and their exit codes."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from checkpoints import flip_bit, printed
from thread_ranks import on_ranks

import ckpt
from ckpt.check import comparing
from ckpt.cli import main


def save_rows(path, arrays, size=2, **options):
    """Saved by `size` ranks, the rows cut between them along the mesh axis dp_shard; scalars by one of them."""

    def act(comm):
        tensors = {}
        for name, array in arrays.items():
            tensors[name] = array
            if array.ndim:
                first, last = (len(array) * rank // size for rank in (comm.rank, comm.rank + 1))
                offset = (first, *(0,) * (array.ndim - 1))
                axes = ("dp_shard", *(None,) * (array.ndim - 1))
                tensors[name] = ckpt.Shard(array[first:last], array.shape, offset, axes)
        ckpt.save(path, tensors, comm=comm, **options)

    on_ranks(size, act)
    return path


ARRAYS = {
    "model/w": np.arange(24, dtype="f4").reshape(4, 6),
    "model/b": np.array([1.0, np.nan, np.inf, -np.inf]),
    "opt/state/count": np.array(7),
    "opt/state/none": np.zeros((0, 3), "f2"),
}


@pytest.fixture
def saved(tmp_path):
    return save_rows(tmp_path / "step-1", ARRAYS, meta={"step": 1, "mesh": {"dp_shard": 2}})


def rows(out):
    return [line.split() for line in out.splitlines()]


def test_show_tells_where_tensors_lie(saved, capsys):
    found = rows(printed(capsys, "show", saved))
    assert ["TENSOR", "DTYPE", "SHAPE", "SIZE", "BLOCKS", "FILES", "AXES"] in found
    assert ["model/", "2", "tensors", "128", "B"] in found
    assert ["model/w", "float32", "4", "x", "6", "96", "B", "2", "rank-00000.h5", "+1", "dp_shard,", "-"] in found
    assert ["opt/state/none", "float16", "0", "x", "3", "0", "B", "0", "dp_shard,", "-"] in found
    starts = [row[0] for row in found if "/" in row[0]][1:]  # without the path
    assert starts == ["model/", "model/b", "model/w", "opt/", "opt/state/", "opt/state/count", "opt/state/none"]
    assert "mesh axes: dp_shard, -\n  rank-00000.h5: [0:2, 0:6]\n" in printed(capsys, "show", saved, "model/w")
    assert json.loads(printed(capsys, "show", saved, "model/w", "--json"))["axes"] == ["dp_shard", None]
    assert ckpt.open(saved)["model/w"].axes == ("dp_shard", None) and ckpt.open(saved)["opt/state/count"].axes is None


def test_show_stats(saved, capsys):
    found = rows(printed(capsys, "show", saved, "--stats"))
    std = f"{np.arange(24).std():.5g}"
    assert ["TENSOR", "DTYPE", "SHAPE", "MEAN", "STD", "MIN", "MAX", "NAN", "INF"] in found
    assert ["model/w", "float32", "4", "x", "6", "11.5", std, "0", "23", "0", "0"] in found
    assert ["model/b", "float64", "4", "1", "0", "1", "1", "1", "2"] in found
    assert ["opt/state/count", "int64", "scalar", "7", "0", "7", "7", "0", "0"] in found
    assert ["opt/state/none", "float16", "0", "x", "3", "0", "0"] in found
    stats = json.loads(printed(capsys, "show", saved, "--stats", "--json"))["tensors"]["model/b"]["stats"]
    assert stats == {"num_finite": 1, "mean": 1.0, "std": 0.0, "min": 1.0, "max": 1.0, "num_nan": 1, "num_inf": 2}


def test_show_stats_of_one_tensor_draws_a_histogram(saved, capsys):
    out = printed(capsys, "show", saved, "model/w", "--stats")
    assert f"mean 11.5, std {np.arange(24).std():.5g}, min 0, max 23, NaN 0, infinite 0\n" in out
    bars = [row for row in rows(out) if row[-1].startswith("\u2588")]
    assert len(bars) == 16 and sum(int(row[1]) for row in bars) == 24
    assert {(row[1], len(row[2])) for row in bars} == {("1", 25), ("2", 50)}
    found = json.loads(printed(capsys, "show", saved, "model/w", "--stats", "--json"))
    assert sum(found["histogram"]["counts"]) == 24 and found["histogram"]["edges"][-1] == 23.0
    assert "NaN 0, infinite 0" in printed(capsys, "show", saved, "opt/state/none", "--stats")


@pytest.mark.rest
def test_show_writes_a_picture(saved, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("model/w", "model/b", "opt/state/none"):
        picture = tmp_path / f"{name.rpartition('/')[2]}.png"
        printed(capsys, "show", saved, name, "--histogram", picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["show", str(saved), "model/w", "--histogram", str(tmp_path / "x.unknown")]) == 2
    assert "--histogram" in capsys.readouterr().err
    assert main(["show", str(saved), "--histogram", str(tmp_path / "x.png")]) == 2
    assert "--histogram draws one tensor" in capsys.readouterr().err
    assert main(["show", str(saved), "model/w", "--histogram", str(saved / "x.png")]) == 2
    assert "is a checkpoint, in which nothing is ever changed" in capsys.readouterr().err
    assert not (saved / "x.png").exists()


@pytest.mark.rest
def test_a_picture_without_matplotlib_is_one_line(saved, tmp_path):
    """In a process that cannot import it: None in sys.modules is Python's own way to say so."""
    script = "import sys; sys.modules['matplotlib'] = None; from ckpt.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "show", str(saved), "model/w", "--histogram", str(tmp_path / "x.png")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1])},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ckpt: --histogram needs matplotlib") and "mpitrain[plot]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_diff_of_the_same_values_however_they_are_cut(saved, capsys, tmp_path):
    other = save_rows(tmp_path / "other", ARRAYS, size=3, meta={"step": 1, "mesh": {"dp_shard": 2}})
    assert printed(capsys, "diff", saved, other) == "no difference in 4 tensors\n"
    found = json.loads(printed(capsys, "diff", saved, other, "--json"))
    assert found["same"] is True and found["tensors"] == found["meta"] == []


def test_diff_says_what_and_by_how_much(saved, capsys, tmp_path):
    changed = {**ARRAYS, "model/w": ARRAYS["model/w"] + np.eye(4, 6, dtype="f4"), "model/new": np.ones(1)}
    changed["model/b"] = np.array([1.0, 2.0, np.inf, -np.inf])
    changed["opt/state/count"] = np.array([7.0, 8.0])
    del changed["opt/state/none"]
    other = save_rows(tmp_path / "step-2", changed, size=1, meta={"step": 2, "mesh": {"dp_shard": 1}})
    out = printed(capsys, "diff", saved, other, code=1)
    assert "only in A: opt/state/none\nonly in B: model/new\nmeta step: 1 -> 2\nmeta mesh.dp_shard: 2 -> 1\n" in out
    assert ["model/w", "values", "4", "24", "[0,", "0]", "1", "1", "0"] in rows(out)
    assert ["model/b", "values", "1", "4", "[1]", "0", "0", "1"] in rows(out)
    assert ["opt/state/count", "int64", "->", "float64,", "scalar", "->", "2"] in rows(out)
    assert out.endswith("3 of 3 tensors differ\n")
    found = json.loads(printed(capsys, "diff", saved, other, "--json", code=1))
    assert not found["same"] and [tensor["name"] for tensor in found["tensors"]] == sorted(ARRAYS)[:3]
    assert found["meta"][0] == {"key": "step", "a": "1", "b": "2"}
    # what is to be looked at, and how closely
    printed(capsys, "diff", saved, other, "--only", "*/w", code=1)
    assert printed(capsys, "diff", saved, other, "--only", "*/w", "--atol", "1") == "no difference in 1 tensors\n"
    printed(capsys, "diff", saved, other, "--only", "*/w", "--rtol", "0.9", code=1)
    printed(capsys, "diff", saved, other, "--only", "*/w", "--rtol", "1")
    printed(capsys, "diff", saved, other, "--only", "*/w", "--only", "*/b", "--atol", "1", code=1)
    assert main(["diff", str(saved), str(other), "--only", "nothing"]) == 2
    assert "neither checkpoint has a tensor called 'nothing'" in capsys.readouterr().err
    assert main(["diff", str(saved), str(tmp_path / "nowhere")]) == 2


def test_the_first_element_that_differs_by_its_index(tmp_path, monkeypatch):
    """In tensors of several slabs and pieces, with and without a tolerance, and between two dtypes."""
    monkeypatch.setattr(comparing, "_SLAB_BYTES", 200)
    monkeypatch.setattr(comparing, "_PIECE", 7)
    shape, index = (3, 5, 11), (1, 3, 9)
    before = np.arange(165, dtype="f4").reshape(shape)
    after = before.copy()
    after[2, 4, 10] += 1
    after[index] += 0.5
    a = save_rows(tmp_path / "a", {"x": before, "wide": before.astype("f8"), "same": before, "scalar": np.array(1)})
    b = save_rows(
        tmp_path / "b", {"x": after, "wide": after, "same": before.astype("f8"), "scalar": np.array(2)}, size=3
    )
    opened = ckpt.open(a), ckpt.open(b)
    firsts = {each.name: (each.first, each.num_differing) for each in comparing.compare(*opened).tensors}
    assert firsts == {"x": (index, 2), "wide": (index, 2), "same": (None, 0), "scalar": ((), 1)}
    assert comparing.compare(*opened, only=["x"], atol=0.7).tensors[0].first == (2, 4, 10)


def test_diff_shows_long_values_of_the_meta_where_they_differ(capsys, tmp_path):
    for name in ("a", "b"):
        ckpt.save(tmp_path / name, {}, comm=None, meta={"text": "x" * 500 + name + "y" * 500, "many": [name] * 30})
    lines = printed(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1).splitlines()
    assert lines[0] == f"meta text: ... {'x' * 15}a{'y' * 44} ... -> ... {'x' * 15}b{'y' * 44} ..."
    assert lines[1] == 'meta many[0]: "a" -> "b"' and len([line for line in lines if line.startswith("meta ")]) == 20
    assert lines[20:] == ["... and 11 more (--json prints all)", "0 of 0 tensors differ"]


@pytest.mark.parametrize("value", ["-1", "nan", "much"])
def test_tolerances_are_numbers(value, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["diff", "a", "b", f"--atol={value}"])
    assert raised.value.code == 2 and "--atol" in capsys.readouterr().err


@pytest.mark.rest
def test_verify(saved, capsys, tmp_path):
    save_rows(tmp_path / "step-2", ARRAYS)
    assert ": whole, " in printed(capsys, "verify", saved)
    assert len(printed(capsys, "verify", tmp_path, "--all").splitlines()) == 2
    flip_bit(saved / "rank-00001.h5", ARRAYS["model/w"][2:].tobytes())
    out = printed(capsys, "verify", saved, code=1)
    assert "rank-00001.h5, bytes " in out and "of tensor 'model/w': its checksum does not match\n" in out
    assert printed(capsys, "verify", tmp_path).startswith(f"{tmp_path / 'step-2'}: whole")  # the newest
    (tmp_path / "step-2" / "index.h5").unlink()
    printed(capsys, "verify", tmp_path / "step-2", code=1)
    save_rows(tmp_path / "lost" / "a", ARRAYS)
    (tmp_path / "lost" / "a" / "manifest.jsonl").unlink()
    assert "has no manifest.jsonl" in printed(capsys, "verify", tmp_path / "lost" / "a", code=1)
    first, second = json.loads(printed(capsys, "verify", tmp_path, "--all", "--json", code=1))
    assert (first["path"], first["problem"]) == (str(saved), None)
    assert [damage["tensor"] for damage in first["damage"]] == ["model/w"]
    assert "index.h5 is missing" in second["problem"] and second["damage"] == []
    for args in (["verify", "nowhere"], ["verify", str(tmp_path / "empty"), "--all"]):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert main(args) == 2
        assert capsys.readouterr().err.startswith("ckpt: ")


@pytest.mark.rest
def test_who_looks_at_a_terminal_sees_progress(saved):
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        env = {**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1]), "TERM": "xterm"}
        command = [sys.executable, "-m", "ckpt", "verify", str(saved)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=env, check=True)
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # how Linux says that nobody is at the other end
            while piece := terminal.read(4096):
                shown += piece
    assert b"verifying" in shown and b"whole" in done.stdout and b"verifying" not in done.stdout


@pytest.mark.rest
def test_deeply_nested_meta_is_no_traceback(tmp_path, capsys):
    meta: dict = {}
    for _ in range(300):
        meta = {"x": meta}
    for name in ("a", "b"):
        ckpt.save(tmp_path / name, {}, comm=None, meta={"deep": meta, "name": name})
    assert printed(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1).startswith('meta name: "a" -> "b"\n')
    before = sys.getrecursionlimit()
    codes = []
    try:
        for limit in range(300, 800, 5):  # the same as deeper ones, wherever it is that they are too deep
            sys.setrecursionlimit(limit)
            codes.append(main(["show", str(tmp_path / "a"), "--json"]))
            err = capsys.readouterr().err
            assert (codes[-1], err.count("\n")) in ((0, 0), (2, 1))
    finally:
        sys.setrecursionlimit(before)
    assert codes[0] == 2 and codes[-1] == 0


def strict(text):
    """What a reader takes that knows nothing but the standard."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.rest
def test_json_is_strict_also_with_nan_and_infinities(tmp_path, capsys):
    meta = {"loss": float("nan"), "bounds": [float("-inf"), {"high": float("inf")}, 1.5]}
    a, b = (
        ckpt.save(tmp_path / name, {"x": np.array(x)}, comm=None, meta=meta)
        for name, x in (("a", -1e308), ("b", 1e308))
    )
    expected = {"loss": "NaN", "bounds": ["-Infinity", {"high": "Infinity"}, 1.5]}
    assert strict(printed(capsys, "show", a, "--json"))["meta"] == expected
    assert strict(printed(capsys, "reshard", a, tmp_path / "c", "--files", "one", "--json"))["meta"] == expected
    assert strict(printed(capsys, "diff", a, b, "--json", code=1))["tensors"][0]["max_abs"] == "Infinity"
    assert np.isnan(ckpt.open(tmp_path / "c").meta["loss"])  # in Python they come back as they are


@pytest.mark.rest
def test_a_terminal_that_knows_ascii_alone(tmp_path):
    """Bars of another sign, escapes in names."""
    path = ckpt.save(tmp_path / "a", {"gewicht/ä": np.arange(20.0)}, comm=None)
    env = {**os.environ, "PYTHONPATH": str(Path(ckpt.__file__).parents[1]), "PYTHONIOENCODING": "ascii"}
    for args in ([], ["gewicht/ä", "--stats"]):
        command = [sys.executable, "-X", "utf8=0", "-m", "ckpt", "show", str(path), *args]
        done = subprocess.run(command, env=env | {"LC_ALL": "C.UTF-8"}, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert r"gewicht/\xe4" in done.stdout and ("##########" in done.stdout) == bool(args)
