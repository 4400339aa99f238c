"""`python -m ckpt gc`: what goes, and above all what does not."""

import json
import os
import re
import subprocess
import sys

import pytest
import xxhash
from checkpoints import names, owner, printed, save

import ckpt
from ckpt.cli import main
from ckpt.commit import leftovers
from ckpt.commit.owner import start_time
from ckpt.format.manifest import VERSION
from ckpt.storage.catalog import LATEST_NAME


def actions(capsys, *args):
    """What a dry run says, checked against what is done then: name -> action."""
    folder = args[0]
    before = names(folder)
    said = json.loads(printed(capsys, "gc", *args, "--dry-run", "--json"))
    assert said["dry_run"] and names(folder) == before
    done = json.loads(printed(capsys, "gc", *args, "--json"))
    assert done["steps"] == said["steps"] and not done["dry_run"]
    found = {os.path.basename(step["path"]): step["action"] for step in done["steps"]}
    assert {name for name in before if name not in names(folder)} == {
        name for name, action in found.items() if action != "keep"
    }
    return found


@pytest.fixture
def steps(tmp_path):
    for step in (100, 150, 200, 250, 300):
        save(tmp_path / f"step-{step}", step)
    return tmp_path


def test_without_options_no_checkpoint_goes(steps, capsys):
    before = names(steps)
    assert printed(capsys, "gc", steps) == "nothing to remove\n"
    (steps / "step-300" / "index.h5").unlink()
    assert printed(capsys, "gc", steps) == "nothing to remove\n"
    assert names(steps) == before


def test_keep(steps, capsys):
    assert actions(capsys, steps, "--keep", 2, "--keep-every", 100) == {"step-150": "remove"}
    assert actions(capsys, steps, "--keep", 2) == {"step-100": "remove", "step-200": "remove"}
    assert names(steps) == [LATEST_NAME, "step-250", "step-300"]


def test_the_newest_complete_one_stays(steps, capsys):
    for step in (300, 250):
        (steps / f"step-{step}" / "index.h5").unlink()
    assert actions(capsys, steps, "--keep", 1) == {"step-100": "remove", "step-150": "remove"}
    assert actions(capsys, steps, "--keep", 1, "--incomplete") == {"step-250": "remove", "step-300": "remove"}
    assert names(steps) == [LATEST_NAME, "step-200"]
    # the hint named one that is gone now
    assert (steps / LATEST_NAME).read_text() == "step-200\n" and names(steps / "step-200")[0] == "index.h5"
    assert ckpt.latest(steps) == steps / "step-200"


def test_incomplete_ones_that_may_be_whole_stay(steps, capsys):
    """A newer format, and what no save made."""
    manifest = steps / "step-300" / "manifest.jsonl"
    body = manifest.read_bytes().replace(b'"version":2', b'"version":%d' % (VERSION + 1), 1)
    body = body[: body.rindex(b"\n", 0, -1) + 1]
    manifest.write_bytes(body + f'{{"xxh3":"{xxhash.xxh3_64_hexdigest(body)}"}}\n'.encode())
    (steps / "step-250" / "manifest.jsonl").unlink()
    (steps / "step-250" / "thesis.tex").write_text("all of it")
    (steps / "step-200" / "manifest.jsonl").write_bytes(b"{}")
    assert actions(capsys, steps, "--incomplete") == {
        "step-200": "remove",
        "step-250": "keep",
        "step-300": "keep",
    }
    out = printed(capsys, "gc", steps, "--incomplete")
    assert "may be whole: the manifest cannot be used: it is of format version" in out
    assert "holds 'thesis.tex', which no save made" in out and out.endswith("nothing to remove\n")


def test_what_dead_jobs_left_goes_what_living_ones_write_does_not(tmp_path, capsys, monkeypatch):
    save(tmp_path / "a")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        stages = {
            ".dead.staging": owner(2**30, start="1"),
            ".living.staging": owner(living.pid, start=start_time(living.pid)),
            ".elsewhere.staging": owner(1, host="another\x1b[31m-host", start="1"),
            ".unsigned.staging": None,
            ".a.replaced": None,
            ".b.removed": None,
            ".dead.board": None,
            ".living.board": None,
            ".ended.board": None,
            ".mine": None,
        }
        for name, text in stages.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "rank-00000.h5").write_bytes(bytes(100))
            if text:
                (tmp_path / name / ".owner").write_text(text)
        # what bears no name may be a job's that is between two steps, for a minute
        expected = {
            ".dead.staging": "remove",
            ".living.staging": "keep",
            ".elsewhere.staging": "keep",
            ".unsigned.staging": "keep",
            ".a.replaced": "keep",
            ".b.removed": "remove",
            ".dead.board": "remove",  # with its stage
            ".living.board": "keep",
            ".ended.board": "keep",
        }
        out = printed(capsys, "gc", tmp_path, "--dry-run")
        assert "\x1b" not in out
        assert re.search(r"\.dead\.staging +would remove +[0-9]+ B +a save of process 1073741824 on .* is gone", out)
        assert actions(capsys, tmp_path) == expected
        assert not (tmp_path / ".dead.staging").exists()
        monkeypatch.setattr(leftovers, "QUIET_S", 0.0)
        assert actions(capsys, tmp_path) == {
            ".living.staging": "keep",
            ".living.board": "keep",
            ".elsewhere.staging": "keep",
            ".unsigned.staging": "remove",
            ".a.replaced": "remove",
            ".ended.board": "remove",
        }
        assert names(tmp_path) == [".elsewhere.staging", ".living.board", ".living.staging", ".mine", "a", LATEST_NAME]
        living.communicate(b"\n")
    assert actions(capsys, tmp_path)[".living.staging"] == "remove"
    assert ckpt.latest(tmp_path) == tmp_path / "a"


def test_a_checkpoint_that_a_dead_job_hid_gets_its_name_back(steps, capsys, monkeypatch):
    monkeypatch.setattr(leftovers, "QUIET_S", 0.0)
    (steps / "step-300").rename(steps / ".step-300.replaced")
    found = json.loads(printed(capsys, "gc", steps, "--keep", "1", "--json"))["steps"]
    assert [step["action"] for step in found] == ["restore", *["remove"] * 4]
    assert names(steps) == [LATEST_NAME, "step-300"]
    assert (ckpt.open(steps / "step-300")["x"][:] == 300).all()


def test_a_run_stands_for_its_checkpoints(tmp_path, capsys, monkeypatch):
    save(tmp_path / "checkpoints" / "step-1")
    save(tmp_path / "checkpoints" / "step-2")
    monkeypatch.chdir(tmp_path)
    out = printed(capsys, "gc", ".", "--keep", "1")
    assert "older than the newest one" in out and "freed " in out
    assert names(tmp_path / "checkpoints") == [LATEST_NAME, "step-2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["step-100"], "is a checkpoint; gc takes the folder"),
        (["."], None),
        (["nowhere"], "No such file"),
        ([".", "--keep-every", "2"], "it needs --keep K"),
    ],
)
def test_errors_are_one_line(steps, capsys, monkeypatch, args, message):
    monkeypatch.chdir(steps)
    assert main(["gc", *args]) == (2 if message else 0)
    err = capsys.readouterr().err
    assert (message in err and err.count("\n") == 1) if message else not err
    assert len(names(steps)) == 6


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_numbers_to_keep_are_at_least_1(steps, capsys, number):
    with pytest.raises(SystemExit) as raised:
        main(["gc", str(steps), f"--keep={number}"])
    assert raised.value.code == 2 and "expected a whole number of at least 1" in capsys.readouterr().err
