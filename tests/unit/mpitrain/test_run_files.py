"""The files of a run's folder where somebody else has put a pipe, a link or something too long; and programs in such a folder."""

import gzip
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.diagnosis.checked import DifferentCallsError
from mpitrain import files
from mpitrain.cli import _line
from mpitrain.job.elastic.lease import Lease, raise_lease, read_lease
from mpitrain.job.elastic.supervisor.folder import RunFolder
from mpitrain.job.record.files import marks
from mpitrain.job.record.files.events import write_event
from mpitrain.job.record.files.folder_lock import FolderLock, Holder
from mpitrain.job.record.files.lines import LinesFile, is_evaluated
from mpitrain.job.record.trace import request
from mpitrain.view.watch.watched import Watched

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("make", "what"), [(os.mkfifo, "a pipe"), (Path.mkdir, "a folder")])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None], what: str) -> None:
    path = tmp_path / "x"
    make(path)
    for act in (files.read, files.reading, files.adding, lambda file: list(files.blocks_of_lines(file))):
        if act is files.adding and what == "a folder":
            continue  # the system's own error
        with pytest.raises(OSError, match=f"{path}: it is {what}.*; expected a regular file"):
            act(path)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("keep")
    for act in (files.read, files.adding, files.open_regular):
        with pytest.raises(OSError, match="it is a link; expected a regular file"):
            act(tmp_path / "link")
    assert files.read(tmp_path / "file") == b"keep"
    with pytest.raises(OSError, match="it has 4 bytes; expected at most 3"):
        files.read(tmp_path / "file", most_bytes=3)


def test_a_new_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    path = tmp_path / "mark"
    files.partial_of(path).symlink_to(tmp_path / "precious")
    path.symlink_to(tmp_path / "precious")
    files.replace(path, b"new", 0o600)
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink()
    assert (tmp_path / "precious").read_text() == "keep" and {each.name for each in tmp_path.iterdir()} == {
        "mark",
        "precious",
    }
    with pytest.raises(FileExistsError):
        files.making(path)


def test_lines_and_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 16)
    monkeypatch.setattr(files, "_FREE_BYTES", 16)
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 40)
    path = tmp_path / "a"
    path.write_bytes(b"one\n" + b"t" * 30 + b"\nthree\nfour")
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()[:9]) + gzip.compress(path.read_bytes()[9:]))  # two members
    for file in (path, packed):
        found = list(files.blocks_of_lines(file))
        assert b"\n".join(text for text, _ in found) == path.read_bytes()
        assert [is_torn for _, is_torn in found] == [False] * (len(found) - 1) + [True]
    path.write_bytes(b"one\n" + b"t" * 60)
    with pytest.raises(OSError, match="it has a line of more than 40 bytes"):
        list(files.blocks_of_lines(path))
    packed.write_bytes(gzip.compress(b"a\n" * 100)[:-9])
    with pytest.raises(OSError, match="it is cut off, or no gzip file"):
        list(files.blocks_of_lines(packed))
    packed.write_bytes(gzip.compress(b"a\n" * 1_000_000))
    with pytest.raises(OSError, match="it unpacks to too much"):
        list(files.blocks_of_lines(packed))


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000, "x = " + "{a = " * 5000, ".".join("a" * 5000) + " = 1", "[" + " . ".join(['"a"'] * 5000) + "]",
        "[a]\n" + ".".join(["'a'"] * 5000) + "=1", 'b = "x" # y\n' + ".".join("a" * 5000) + " = 1", 'a = "',
    ],
)  # fmt: skip
def test_settings_that_are_too_deep(text: str) -> None:
    began = time.perf_counter()
    with pytest.raises(ValueError):
        files.toml_of(text)
    assert time.perf_counter() - began < 1


def test_settings_with_many_dots() -> None:
    dots = "a.b.c." * 10
    text = f"x = '{dots}'\ny = \"{dots} \\\" {dots}\" # {dots}\nz = '''{dots}\n'{dots}'''\nw = [1.5, 2.5,\n3.5]\n"
    assert files.toml_of(text) == {"x": dots, "y": f'{dots} " {dots}', "z": f"{dots}\n'{dots}", "w": [1.5, 2.5, 3.5]}


LIST = "[data]\npath = [" + "".join(f'"s3://bucket/{"d" * 180}/{n:08}", ' for n in range(50_000)) + "]\n"


@pytest.mark.parametrize(
    "text",
    [
        "a0.b.c.d.e.f.g.h.i.j.k = 1\n" * 37_500, "a = [" + "1," * 375_000 + "]", "[a]\n" * 250_000,
        'a = "' + "\\n" * 1_000_000 + '"', "a = [" + '"",' * 250_000 + "]", 'a = """' + "x" * 2_500_000 + '"""',
        "a = '\U0001f600" + "a" * 1_150_000, "a = [1," + " " * 2_500_000 + "2]", 'a = """a""""\n' + ".".join("a" * 5000) + ' = 1 # "',
    ],
)  # fmt: skip
def test_settings_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """With an eighth of the limits, in an eighth of the time."""
    monkeypatch.setattr(files, "_MOST_WORK", files._MOST_WORK // 8)
    monkeypatch.setattr(files, "MOST_SETTINGS_BYTES", files.MOST_SETTINGS_BYTES // 8)
    path = tmp_path / "x"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ValueError, match=r"too long|too deeply|expected at most"):
        files.read_toml(path)
    assert time.process_time() - began < 0.25


def test_settings_with_long_lists(tmp_path: Path) -> None:
    """Of shards, in each kind of quotes: the same as Python's module reads."""
    path = tmp_path / "x"
    path.write_text(LIST)
    began = time.process_time()
    found = files.read_toml(path)["data"]["path"]
    assert time.process_time() - began < 2
    assert found == json.loads(LIST[LIST.index("[", 1) :].rstrip(", ]\n") + "]") and len(found) == 50_000
    long = "long enough for another kind of quotes"
    text = rf'''
a = "{long}" # "{long}
b = ["{long}", "{long}'s", "{long}\"", '{long}"', "", "short", """{long}
""""", """{long}\"""", "{long}"]
"{long}" = {{ "{long} a" = "{long}", c.'{long}' = "{long}é\u00e9" }}
[t."{long}"]
d = "{long}"
'''
    assert files.toml_of(text) == tomllib.loads(text)
    for wrong in (f"a = ''\"{long}\"'''", f'a = "{long}', f'a = "{long}\n"', f"a = \"{long}\"''", f'a = "{long}\0"'):
        with pytest.raises(ValueError):
            files.toml_of(wrong)


@pytest.mark.parametrize(
    "content", ["pipe", "[" * 100_000, '{"launch": 1e999, "step": 1e999}', '{"launch": 1180591620717411303424}', "\0"]
)
def test_marks_that_no_run_has_written_say_nothing(tmp_path: Path, content: str) -> None:
    for name in (".alive", ".done", ".launch", ".lock", ".trace"):
        os.mkfifo(tmp_path / name) if content == "pipe" else (tmp_path / name).write_text(content)
    assert (
        marks.read_alive(tmp_path) is None and marks.read_done(tmp_path, 1) is None and marks.last_launch(tmp_path) == 0
    )
    assert not marks.is_left_behind(tmp_path) and request.read(tmp_path) is None
    os.utime(tmp_path / ".lock", (0, 0))
    holder = Holder(tmp_path)
    assert holder.is_gone() is not None or holder.is_old(), "`trace` does not wait for it"
    folder = RunFolder(tmp_path)
    assert folder.launch == 0 and folder.done() is None
    folder.break_lock(None)
    folder.prepare("s")
    assert json.loads((tmp_path / ".launch").read_text())["launch"] == 1


@pytest.mark.parametrize(
    "said", ['{"run": "../../x", "number": 3}', '{"run": "a", "number": 1e30}', '{"run": "a*", "number": 1}', "[]"]
)
def test_a_lease_of_a_stranger_names_no_files(tmp_path: Path, said: str) -> None:
    (tmp_path / ".lease").write_text(said)
    assert read_lease(tmp_path) is None and raise_lease(tmp_path).number == 1
    (tmp_path / ".lease").write_text('{"run": "abc", "number": 7}')
    assert raise_lease(tmp_path) == Lease("abc", 8)


def test_a_resume_into_a_folder_with_pipes_ends_in_an_error(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="a pipe"):
        LinesFile(tmp_path / "metrics.jsonl", steps_done=1)
    with pytest.raises(OSError, match="a pipe"):
        is_evaluated(tmp_path / "metrics.jsonl", 1)
    with pytest.raises(OSError, match="a pipe"):
        write_event(tmp_path, "begin")
    (tmp_path / "failure.txt").symlink_to("/dev/zero")
    folder = RunFolder(tmp_path)
    assert folder.report_text() == ""
    FolderLock(tmp_path).release()


def test_programs_do_not_import_from_the_current_folder(tmp_path: Path) -> None:
    """`import numpy` and `import json` of our programs are not those of a shared folder, in which a job was started."""
    for name in ("numpy", "json", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the current folder')")
    (tmp_path / "mine.py").write_text("")
    script = "import sys; sys.path[:0] = sys.argv[1:]; from collectives.programs import python; print(*python('x')[1:])"
    away = tmp_path / "away"
    away.mkdir()
    (away / "mine.py").write_text("")
    (away / "gone").mkdir()

    def words(cwd: Path, *more: str) -> list[str]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-P", "-c", more[0] + script if more else script]
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": path}
        )
        return done.stdout.split()

    assert words(tmp_path) == ["-P", "-m", "x"]
    of_child = script.replace("python('x')[1:]", "import_paths()").replace("import python", "import import_paths")
    for more in ("import sys; sys.path.insert(0, ''); ", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "):
        found = subprocess.run(
            [sys.executable, "-c", f"import collectives.programs; {more}{of_child}"], cwd=tmp_path, capture_output=True, text=True,
            timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        ).stdout.split()  # fmt: skip
        assert str(ROOT) in found and str(tmp_path) not in found and "" not in found
    gone = subprocess.run(
        [sys.executable, "-P", "-c", f"import os; os.rmdir(os.getcwd()); {script}"], cwd=away / "gone", capture_output=True, text=True,
        timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert gone.stdout.split() == ["-P", "-m", "x"], gone.stderr
    assert words(away, "import sys; sys.path.append(''); import mine; ") == ["-m", "x"], (
        "the user's module came from there"
    )
    sources = [
        path for package in ("collectives", "ckpt", "mpitrain", "benchmarks") for path in (ROOT / package).rglob("*.py")
    ]
    assert len(sources) > 300
    others = [path for path in sources if re.search(r'sys\.executable,\s*"-m"', path.read_text())]
    assert not others, "collectives.programs makes these commands"


def test_a_long_report_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Each rank of a large job may add a traceback."""
    folder = RunFolder(tmp_path)
    (tmp_path / "failure.txt").write_text("time\nrank 7: the first one\n" + "more\n" * 1_000_000)
    assert folder.report_text().startswith("time\nrank 7: the first one\n")
    assert Watched(tmp_path)._failure() == "rank 7: the first one"


def test_an_error_is_one_line_but_the_table_of_different_calls_is_not() -> None:
    text = "the ranks differ:\n  rank 0: a\x1b\n  rank 1: b"
    assert _line(text, ValueError(text)).count("\n") == 0
    assert _line(text, DifferentCallsError(text)).splitlines()[1:] == ["  rank 0: a\\x1b", "  rank 1: b"]
