"""New lines of a file that grows, is cut by a resume, is replaced, or is not there yet."""

from pathlib import Path

import pytest

from mpitrain.view.reading import follow
from mpitrain.view.reading.follow import Follower, News


def steps(follower: Follower) -> tuple[list[int], bool]:
    news = follower.read()
    assert not news.has_more
    return [line["step"] for line in news.lines], news.is_anew


def test_a_file_that_appears_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    follower = Follower(path)
    assert steps(follower) == ([], False), "there is not even a folder"
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert steps(follower) == ([1, 2], False)
    assert steps(follower) == ([], False), "the last line is torn"
    with path.open("a") as file:
        file.write('ss": 4.5}\n\x00\x00\n{"step": 4}\n')
    assert steps(follower) == ([3, 4], False)


@pytest.mark.parametrize("later", [3, 4, 9])
def test_a_resume_cuts_the_file_and_does_steps_again(tmp_path: Path, later: int) -> None:
    """The file may be shorter than before at the next look, as long, or longer."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "time": 100.5}}\n' for step in range(1, 5)))
    follower = Follower(path)
    assert steps(follower) == ([1, 2, 3, 4], False)
    with path.open("r+") as file:
        file.truncate(2 * len('{"step": 1, "time": 100.5}\n'))
        file.seek(0, 2)
        file.write("".join(f'{{"step": {step}, "time": 200.5}}\n' for step in range(3, later + 1)))
    assert steps(follower) == (list(range(1, later + 1)), True)
    assert steps(follower) == ([], False)


def test_a_torn_line_is_cut_and_nothing_is_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    follower = Follower(path)
    assert steps(follower) == ([1], False)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert steps(follower) == ([2], False)


def test_a_run_that_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 5}\n{"step": 2, "loss": 4}\n')
    follower = Follower(path)
    assert steps(follower) == ([1, 2], False)
    path.rename(tmp_path / "old")
    assert steps(follower) == ([], True)
    path.write_text('{"step": 1, "loss": 6}\n')
    assert steps(follower) == ([1], False)


def test_only_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    path.write_text("".join(f'{{"step": {step}, "ranks": {{"a": [{{}}]}}}}\n' for step in range(10, 100)))
    length = len('{"step": 10, "ranks": {"a": [{}]}}\n')
    for last_bytes in range(2 * length, 3 * length):
        assert steps(Follower(path, last_bytes=last_bytes)) == ([98, 99], False)


def test_long_files_come_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BLOCK_BYTES", 64)
    monkeypatch.setattr(follow, "MOST_LINE_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    whole = "".join(f'{{"step": {step}}}\n' for step in range(10, 40))
    path.write_text(whole[:200] + "x" * 300 + "\n" + whole[200:])  # in the middle of the line of step 25
    follower, found = Follower(path), []
    while True:
        news = follower.read()
        found += [line["step"] for line in news.lines]
        if not news.has_more:
            break
    assert [step for step in found if step != 25] == [step for step in range(10, 40) if step != 25]


def test_a_last_line_of_a_whole_block_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BLOCK_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\0" * 1000)
    follower = Follower(path, last_bytes=64)
    assert follower.read() == News([], False, False)
    with path.open("ab") as file:
        file.write(b'\n{"step": 1}\n')
    found = [follower.read() for _ in range(2)]
    assert [line for news in found for line in news.lines] == [{"step": 1}] and not found[-1].has_more
