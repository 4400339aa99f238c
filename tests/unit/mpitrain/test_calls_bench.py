"""The counts of `bench calls`, from lines that strace has written."""

from pathlib import Path

import pytest

from mpitrain.tools.bench import calls

LINES = """\
1.0 openat(AT_FDCWD</work>, "/env/lib/a.py", O_RDONLY|O_CLOEXEC) = 3</env/lib/a.py>
1.1 read(3</env/lib/a.py>, "print(\\"/home/no\\")"..., 100) = 12
1.2 newfstatat(AT_FDCWD</work>, "runs/x/../y", 0x7ffe, 0) = -1 ENOENT (No such file or directory)
1.3 newfstatat(3</env/lib/a.py>, "", {st_mode=S_IFREG|0644, st_size=12, ...}, AT_EMPTY_PATH) = 0
1.4 readlink("/envious", 0x7ffe, 1023) = -1 EINVAL (Invalid argument)
1.5 read(4<pipe:[1234]>, "x", 1) = 1
1.6 write(1<pipe:[99]>, "run starts\\nstep 1/1  loss 5\\n", 40) = 40
1.7 write(5</run/metrics.jsonl>, "{}", 2) = 2
+++ exited with 0 +++
"""


@pytest.fixture
def traced(tmp_path: Path) -> list[calls.SystemCall]:
    (tmp_path / "rank.1").write_text(LINES)
    return sorted(calls.read(tmp_path / "rank.1"))


def test_a_call_has_the_path_that_it_names_or_that_its_descriptor_has(traced: list[calls.SystemCall]) -> None:
    assert [(call.name, call.path) for call in traced] == [
        ("openat", "/env/lib/a.py"),
        ("read", "/env/lib/a.py"),
        ("newfstatat", "/work/runs/y"),
        ("newfstatat", "/env/lib/a.py"),
        ("readlink", "/envious"),
        ("read", ""),
        ("write", ""),
        ("write", "/run/metrics.jsonl"),
    ]


def test_calls_count_up_to_the_text(traced: list[calls.SystemCall]) -> None:
    counted = calls.before(traced, "step 1/")
    assert counted is not None
    assert [call.time_s for call in counted] == [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    assert calls.before(traced, "tep 1/") is None
    assert calls.before(traced, "") == traced


def test_the_innermost_folder_counts(traced: list[calls.SystemCall], capsys: pytest.CaptureFixture[str]) -> None:
    given = calls.parser().parse_args(["--np", "2", "--most", "3", "--show", "1", "x"])
    assert calls.report(traced, {"/env": "environment", "/env/lib": "below"}, given) == 0
    said = capsys.readouterr().out
    assert "| below | /env/lib | 3 |" in said
    assert "environment" not in said
    assert said.endswith("3 calls of 2 ranks; expected at most 3\n")
    given.most = 2
    assert calls.report(traced, {"/env": "environment", "/work": "packages"}, given) == 1


def test_the_run_is_the_one_that_the_command_names() -> None:
    assert calls.run_of(["python", "--run", "/a"]) == "/a"
    assert calls.run_of(["python", "--run=/b"]) == "/b"
    assert calls.run_of(["python"]) == "runs/default"
