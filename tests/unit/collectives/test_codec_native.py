"""Where the compiled codec comes from, and what happens where it cannot come from there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collectives.codec import choice, native

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPITRAIN_CACHE_DIR", str(tmp_path_factory.mktemp("library")))
        native.load()
        (file,) = native.cache_folder().rglob("*.so")
        return file


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of compiled files, in an empty cache; nothing is chosen yet."""
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("MPITRAIN_CODEC", raising=False)
    monkeypatch.setattr(choice, "_found", None)
    choice.chosen.cache_clear()
    yield tmp_path / "cache" / "codec"
    choice.chosen.cache_clear()


@pytest.mark.rest
@needs_compiler
@pytest.mark.parametrize("what", ["open", "group", "above", "foreign", "link", "sticky", "root"])
def test_a_folder_that_another_user_can_replace_is_not_used(
    what: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    set_compiler(tmp_path / "a/b", monkeypatch, copies(library))
    shared = tmp_path / "shared"
    cache = shared / ("above/cache" if what == "above" else "cache")
    cache.mkdir(parents=True)
    if what == "foreign":
        os.chown(shared, 12345, -1)
    shared.chmod({"group": 0o775, "sticky": 0o1777, "foreign": 0o755, "root": 0o755}.get(what, 0o777))
    if what == "link":
        (tmp_path / "link").symlink_to(cache)
        cache = tmp_path / "link"
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", str(cache))
    native.load()
    made = [path for path in tmp_path.rglob("*.so") if "library" not in path.parts]
    elsewhere = tmp_path / f"mpitrain-codec-{os.geteuid()}"
    assert len(made) == 1 and made[0].parent == (cache / "codec" if what in ("sticky", "root") else elsewhere), made


@needs_compiler
def test_folders_that_are_made_are_closed_to_a_group(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_compiler(tmp_path / "a/b", monkeypatch, copies(library))
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", str(tmp_path / "one/two"))
    old = os.umask(0o002)
    try:
        native.load()
    finally:
        os.umask(old)
    (file,) = tmp_path.rglob("*.so")
    assert file.parent == tmp_path / "one/two/codec"
    assert [each.stat().st_mode & 0o777 for each in (*file.parents[:3],)] == [0o700, 0o755, 0o755]


# A compiler of code that fills blocks with ones where it should write zeros.
WRONG_ZEROS = r"""printf '#include <string.h>\n#define memset(to, byte, size) memset(to, 1, size)\n' >"$0.h"
exec cc "$@" -O0 -include "$0.h" """


def set_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder.parents[1] / "my-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def copies(library: Path) -> str:
    """A compiler that takes no time."""
    return f'for last; do :; done; exec /bin/cp {library} "$last"'


@needs_compiler
def test_ranks_that_start_at_once_leave_one_file(folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_compiler(folder, monkeypatch, copies(library))
    with ThreadPoolExecutor(4) as ranks:
        loaded = [rank.result() for rank in [ranks.submit(native.load) for _ in range(4)]]
    assert all(len(each) == len(loaded[0]) >= 1 for each in loaded)
    (file,) = folder.iterdir()
    assert file.suffix == ".so" and folder.stat().st_mode & 0o777 == file.stat().st_mode & 0o777 == 0o700
    set_compiler(folder, monkeypatch, "exit 1")
    name, why, _ = choice.chosen()
    assert name == native.LEVELS[loaded[0][-1].level] and why == "the best for this CPU", "it is compiled no more"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("", "no C compiler: no-such-cc not found"),
        ("echo 'codec.c:1: out of luck' >&2; echo more >&2; exit 1", "my-cc cannot compile it: codec.c:1: out of luck"),
        ("while :; do :; done", "my-cc takes longer than 0.2 s"),
        ("exit 0", "file too short"),
        ("for last; do :; done; exec cc -xc /dev/null -shared -o $last", "undefined symbol: codec_level"),
        pytest.param(
            WRONG_ZEROS,
            "the compiled code has other bits in int8",
            marks=needs_compiler,
        ),
    ],
    ids=["none", "broken", "slow", "empty", "other", "inexact"],
)
def test_without_a_good_compiler_numpy_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setenv("CC", "no-such-cc")
    if script:
        set_compiler(folder, monkeypatch, script)
    name, why, _ = choice.chosen(compile_s=0.2 if "while" in script else 60)
    assert name == "numpy" and reason in why and "\n" not in why
    assert not list(folder.iterdir()), "a file that was not tried, or a temporary file, is left"


def test_a_wrong_name_of_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    assert choice.chosen()[:2] == ("numpy", "CC is 'gcc \"': No closing quotation")


def test_only_the_first_rank_of_a_node_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_compiler(folder, monkeypatch, "touch $0.called; exit 1")
    assert choice.chosen(compile_s=0)[:2] == ("numpy", "no rank of this node has compiled it")
    assert not list(folder.parents[1].glob("*.called"))
    assert choice.chosen()[:2] == ("numpy", "no rank of this node has compiled it"), "nor does it later"


@pytest.mark.rest
@needs_compiler
def test_a_level_with_other_bits_leaves_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = native.load()[-1].level
    if best == 0:
        pytest.skip("this CPU runs the portable code alone")
    set_compiler(
        folder, monkeypatch, 'exec cc "$@" -O0 -ffinite-math-only'
    )  # then x != x is false; vectors compare by name
    assert [each.level for each in native.load()] == list(range(1, best + 1))


@needs_compiler
def test_the_variable_names_the_best_one_allowed(folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_compiler(folder, monkeypatch, copies(library))
    monkeypatch.setenv("MPITRAIN_CODEC", "numpy")
    assert choice.chosen()[:2] == ("numpy", "MPITRAIN_CODEC=numpy")
    assert not folder.exists(), "no compiler was started"
    choice.chosen.cache_clear()
    monkeypatch.setenv("MPITRAIN_CODEC", "c")
    assert choice.chosen()[:2] == ("c", "MPITRAIN_CODEC=c")


@needs_compiler
@pytest.mark.parametrize("how", ["others write", "others write the file", "a link", "cannot be loaded"])
def test_a_folder_that_cannot_be_trusted_or_used_is_left_alone(
    folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The library then comes from the user's temporary folder."""
    set_compiler(folder, monkeypatch, copies(library))
    native.load()
    (file,) = folder.iterdir()
    bad = folder.parents[1] / "bad" / "codec"
    bad.mkdir(parents=True)
    (bad / file.name).write_bytes(b"no library")
    if how == "others write":
        bad.chmod(0o777)
    elif how == "others write the file":
        shutil.copy(library, bad / file.name)
        (bad / file.name).chmod(0o775)
    elif how == "a link":
        bad.rename(bad.with_name("target"))
        bad.symlink_to("target")
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", str(bad.parent))
    native.load()
    (own,) = folder.parents[1].glob("mpitrain-codec-*/*")
    assert own.name == file.name and own.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_compiler(folder, monkeypatch, "exit 1")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # now this user's folders are another user's
    name, why, _ = choice.chosen()
    assert name == "numpy" and why.count("another user can write to this folder") == 2
