"""The file that keeps a measured table."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from collectives.environment import cache_folder
from collectives.selection import table_cache
from collectives.selection.selector import Placement
from collectives.selection.table import Table, TableEntry

MACHINE = table_cache.this_machine("Some MPI 1.0", Placement.of([2, 2, 4]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "the" / "cache"
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", str(folder))
    return folder


def table(machine: Any = MACHINE) -> Table:
    return Table((TableEntry("broadcast", "native", "private", 8, 3, ((None, "tree"),)),), machine)


def test_the_machine_is_told_by_what_the_figures_depend_on() -> None:
    assert (MACHINE["mpi"], MACHINE["nodes"], MACHINE["ranks_per_node"]) == ("Some MPI 1.0", 3, [2, 4])
    assert MACHINE["cpu"] and MACHINE["cores"] == os.cpu_count() and MACHINE["table"] == 2
    assert os.uname().nodename not in json.dumps(MACHINE)
    others = [
        table_cache.this_machine("Some MPI 1.1", Placement.of([2, 2, 4])),
        table_cache.this_machine("Some MPI 1.0", Placement.of([2, 4])),
        table_cache.this_machine("Some MPI 1.0", Placement.of([2, 2, 2])),
        {**MACHINE, "cpu": "another"},
    ]
    assert len({table_cache.path_of(machine) for machine in (MACHINE, *others)}) == 5


def test_the_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("MPITRAIN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/mpitrain")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/mpitrain")


def test_what_is_written_is_read_again(capfd: pytest.CaptureFixture[str], cache: Path) -> None:
    assert table_cache.read(MACHINE) is None  # no folder yet
    path = table_cache.path_of(MACHINE)
    table_cache.write(path, Table((), MACHINE))
    table_cache.write(path, table())
    assert table_cache.read(MACHINE) == table()
    assert [file.name for file in cache.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    assert table_cache.read({**MACHINE, "nodes": 4}) is None
    assert capfd.readouterr() == ("", "")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_write_that_fails_leaves_the_old_file_alone(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    path = table_cache.path_of(MACHINE)
    table_cache.write(path, table())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        table_cache.write(path, Table((), MACHINE))
    assert table_cache.read(MACHINE) == table()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (table().to_json().encode()[:54], "Unterminated string"),
        (table().to_json().replace('"tree"', '"sing"').encode(), "algorithm 'sing'; expected one of"),
        (table().to_json().replace('"version": 2', '"version": 0').encode(), "version 0; expected 2"),
        (table({**MACHINE, "cpu": "another"}).to_json().encode(), "measured on another machine"),
        (table(None).to_json().encode(), "measured on another machine"),
        (b"[" * 100_000, "recursion"),
    ],
    ids=["empty", "binary", "cut", "unknown", "old", "foreign", "nobody's", "deep"],
)
def test_a_file_that_cannot_be_used_is_one_line(capfd: pytest.CaptureFixture[str], content: bytes, reason: str) -> None:
    path = table_cache.path_of(MACHINE)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert table_cache.read(MACHINE) is None
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"collectives: {path} is ignored: ") and err.count("\n") == 1
    assert reason in err
    assert err.endswith("remove it, or measure again under this mpirun: python -m collectives tune\n")


def test_a_folder_in_the_file_s_place_is_one_line_too(capfd: pytest.CaptureFixture[str]) -> None:
    table_cache.path_of(MACHINE).mkdir(parents=True)
    assert table_cache.read(MACHINE) is None
    assert "is ignored: Is a directory; remove it" in capfd.readouterr().err
