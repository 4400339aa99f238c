"""`python -m ckpt bench` as real jobs."""

import json
from pathlib import Path

import pytest
from extent import extent
from launching import ROOT, Result, launch

from ckpt.bench.results import BACKGROUND, DCP, LARGE, POSIX, TINY

pytestmark = pytest.mark.rest


def ckpt_bench(num_ranks: int, *arguments: str) -> Result:
    return launch(num_ranks, "-m", "ckpt", "bench", *arguments, cwd=ROOT, timeout_s=90)


def test_everything_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    folder, file = tmp_path / "here", tmp_path / "a.json"
    folder.mkdir()
    arguments = ["--size", "8MB", "--rounds", "2", "--dir", str(folder), "--json", str(file)]
    result = ckpt_bench(2, *arguments, "--peers", "posix,dcp", "--layouts", "rank,2", "--cold")
    assert result.returncode == 0, str(result)
    assert list(folder.iterdir()) == []
    figures = json.loads(file.read_text())
    assert (figures["ranks"], figures["nodes"], figures["rounds"], figures["cold"]) == (2, 1, 2, True)
    assert (figures["nbytes"], figures["tensors"], figures["skipped"]) == (7_920_000, 48, {})
    rows = {(row["contestant"], row["action"]): row for row in figures["rows"]}
    assert len(rows) == len(figures["rows"])
    stored = ("ckpt rank", "ckpt 2", TINY, LARGE)
    expected = {(name, action) for name in stored for action in ("save", "load", "load unverified")}
    expected |= {(name, action) for name in (POSIX, DCP) for action in ("save", "load")}
    expected |= {(BACKGROUND, action) for action in ("copy", "pause", "save", "step", "step meanwhile")}
    assert set(rows) == expected
    for row in rows.values():
        assert 0 < row["fastest_s"] <= row["seconds"] <= row["slowest_s"] < 20
    assert rows[BACKGROUND, "pause"]["seconds"] < rows[BACKGROUND, "save"]["seconds"]
    assert f"writing into {folder}/ckpt-bench-" in result.stdout and "dropped from the page cache" in result.stdout
    for goal in ("save, a file per rank, against DCP", "steps meanwhile, against without", "load 2,000 tensors"):
        assert goal in result.stdout, str(result)


def test_without_torch_dcp_is_skipped_and_said(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\nfrom ckpt.cli import main\nsys.exit(main(['bench', *sys.argv[1:]]))"
    )
    arguments = ["--size", "200kB", "--rounds", "1", "--dir", str(tmp_path), "--layouts", "rank"]
    result = launch(2, "-c", script, *arguments, cwd=ROOT, timeout_s=60)
    assert result.returncode == 0, str(result)
    assert "skipped DCP: torch is not installed" in result.stdout and "against POSIX" in result.stdout


MISTAKES: list[tuple[list[str], str]] = [
    (["--peers", "ftp"], "bench: argument --peers: invalid choice: 'ftp'; expected of posix, dcp"),
    (["--layouts", "3"], "bench: --layouts: 3 files; expected at most 2, one for each rank"),
    (["--size", "100000GB"], "pass a smaller --size"),
    (["--size", "1MB", "--dir", "/nowhere"], "No such file or directory: '/nowhere'"),
]


@pytest.mark.parametrize(("arguments", "message"), extent(MISTAKES[1:2], MISTAKES))
def test_a_mistake_is_one_line_of_all_ranks(arguments: list[str], message: str) -> None:
    result = ckpt_bench(2, *arguments)
    assert result.returncode == 2, str(result)
    assert result.stderr.count("ckpt: ") == 1 and message in result.stderr, str(result)
    assert "Traceback" not in result.stderr and "MPI_ABORT" not in result.stderr, str(result)
