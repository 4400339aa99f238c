"""Packs of a small environment: made, unpacked by several processes at once, removed, damaged, and counted by strace."""

import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpitrain import cli
from mpitrain.tools.doctor.pack import contents
from tests.helpers.packs import inside, say, wait_until_removed

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
IMPORTS = "import thing, added, mine, first; print(thing.__file__, added.__file__, mine.__file__, first.__file__)"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment on a "parallel file system", with modules in four places, as if this process ran in it."""
    folder = tmp_path_factory.mktemp("files") / "shared"
    venv.create(folder / "env", symlinks=True)
    site_packages = folder / "env/lib" / VERSION / "site-packages"
    for path in ("elsewhere/added.py", "checkout/mine/__init__.py", "on_path/first.py"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text("value = 1\n")
    (site_packages / "thing.py").write_text("def main():\n    print('ran', __file__)\n")
    (site_packages / "half.py").write_text("not Python\n")
    (site_packages / "added.pth").write_text(f"{folder / 'elsewhere'}\n")
    (site_packages / "__editable___mine_finder.py").write_text(
        f"MAPPING: dict = {{'mine': '{folder}/checkout/mine'}}\n"
    )
    (site_packages / "mine.pth").write_text("import __editable___mine_finder\n")
    for path, links in (
        ("env/lib/linked/up", {"up": "../../linked", "beside": "../up", "out": "../../../../outside"}),
        ("outside", {"loop": "../outside", "back": str(folder / "env/lib/linked")}),
        ("env/lib/linked", {"again": str(folder / "outside")}),
    ):
        (folder / path).mkdir(parents=True, exist_ok=True)
        (folder / path / f"{Path(path).name}.txt").write_text("read\n")
        for name, target in links.items():
            (folder / path / name).symlink_to(target)
    script = folder / "env/bin/thing"
    script.write_text(f"#!{folder}/env/bin/python\nimport thing\nthing.main()\n")
    script.chmod(0o755)
    standard = [path for path in sys.path if Path(path).is_relative_to(sys.base_prefix) and "site-packages" not in path]
    added = [str(folder / "on_path"), str(site_packages), str(folder / "elsewhere")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "OF_SYSTEM", (Path(sys.base_prefix).resolve(),))
        patch.setattr(sys, "prefix", str(folder / "env"))
        patch.setattr("sysconfig.get_paths", lambda: {"purelib": str(site_packages)})
        patch.setattr(sys, "path", [*standard, *added])
        patch.setenv("PYTHONPATH", str(folder / "on_path"))
        yield folder


@pytest.fixture(scope="module")
def packed(environment: Path) -> Path:
    """A pack of it."""
    assert cli.main(["pack", str(environment.parent / "env.pack")]) == 0
    return environment.parent / "env.pack"


@pytest.fixture
def pack(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, to be unpacked in a "node's memory" of its own."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("MPITRAIN_PACK_DIR", str(tmp_path / "memory"))
    return packed


def test_ranks_run_from_the_nodes_memory_alone(pack: Path, environment: Path) -> None:
    environment.rename(environment.with_name("gone"))
    try:
        check_that_all_runs(pack, environment)
    finally:
        environment.with_name("gone").rename(environment)


def check_that_all_runs(pack: Path, environment: Path) -> None:
    assert say(pack, "unpack") == (0, "", "")
    (folder,) = inside()
    code, output, errors = say(pack, "python", "-c", IMPORTS)
    assert (code, errors) == (0, "")
    assert all(Path(path).is_relative_to(folder) for path in output.split()), output
    for words in (("thing",), (str(environment / "env/bin/thing"),), ("sh", "-c", "exec thing")):
        assert say(pack, *words) == (0, f"ran {folder}/env/lib/{VERSION}/site-packages/thing.py\n", ""), words
    files = [name for _, _, names in os.walk(folder) for name in names if name.endswith(".txt")]
    assert sorted(files) == ["linked.txt", "outside.txt", "up.txt"]  # each once, also where links lead upwards
    for path in ("again/outside.txt", "up/out/back/linked.txt", "up/up/up/beside/up.txt", "again/loop/outside.txt"):
        assert (folder / "env/lib/linked" / path).read_text() == "read\n", path
        assert (folder / "env/lib/linked" / path).resolve().is_relative_to(folder)
    compiled = next(folder.glob(f"env/lib/{VERSION}/site-packages/__pycache__/thing.*")).read_bytes()
    assert compiled[4:8] == b"\1\0\0\0"  # of a hash of the source, which Python does not check
    (folder / f"env/lib/{VERSION}/site-packages/thing.py").write_text("wrong\n")
    assert say(pack, "thing")[0] == 0
    assert say(pack, "remove") == (0, "", "")
    assert not inside()


def test_the_first_of_many_unpacks_and_the_last_removes(pack: Path) -> None:
    where = f"import os, sys, time; print(os.stat(sys.prefix).st_ino, flush=True); {IMPORTS}; sys.stdin.read()"
    held = [
        subprocess.Popen(
            ["bash", pack, "python", "-c", where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    numbers = {process.stdout.readline() for process in held if process.stdout}
    assert len(numbers) == 1, numbers
    code, _, errors = say(pack, "remove")
    assert code == 1
    assert "processes still run in" in errors
    for process in held[1:]:
        process.kill()
        process.communicate()
    time.sleep(0.3)
    assert inside()
    held[0].communicate()
    assert held[0].returncode == 0
    wait_until_removed()


def test_an_old_pack_says_so(pack: Path, environment: Path) -> None:
    later = time.time() + 10
    os.utime(environment / "checkout/mine/__init__.py", (later, later))
    code, _, errors = say(pack, "true")
    os.utime(environment / "checkout/mine/__init__.py", (later - 1e6, later - 1e6))
    assert code == 0
    assert errors == (
        f"env.pack: note: {environment}/checkout/mine/__init__.py has changed since this was packed: to use that, pack "
        "again\n"
    )


def test_the_command_refuses_what_it_would_destroy(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for target, part in (("thesis.tex", "is no pack"), (".", "is a folder"), ("none/env.pack", "does not exist")):
        assert cli.main(["pack", str(tmp_path / target)]) == 1
        error = capsys.readouterr().err
        assert part in error
        assert len(error.splitlines()) == 1
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert cli.main(["pack", str(tmp_path / "env.pack"), "--without", "/thing.py"]) == 0
    said = capsys.readouterr().out
    assert cli.main(["pack", str(tmp_path / "env.pack")]) == 0  # in place of the earlier one
    number = r"env.pack: 0.00 GB, (\d+) files, packed in \d+ s; it takes 0.00 GB of a node's memory"
    (few,), (all_files,) = re.findall(number, said), re.findall(number, capsys.readouterr().out)
    assert int(all_files) == int(few) + 2  # the module and its compiled code


@pytest.mark.rest
@pytest.mark.skipif(
    shutil.which("strace") is None, reason="needs strace, which ./mpirun/setup test installs as root on Debian"
)
def test_ranks_ask_the_parallel_file_system_for_nearly_nothing(
    pack: Path, environment: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(environment)
    words = ["bench", "calls", "--np", "2", "--show", "1000", "--below", str(environment)]
    code = "import thing, added, first; print('step 1/1', flush=True)"
    assert cli.main([*words, "--", str(environment / "env/bin/python"), "-c", code]) == 0
    paths = re.findall(rf" {environment}/(\S+)$", capfd.readouterr().out, re.MULTILINE)
    assert {"elsewhere/added.py", "on_path/first.py", f"env/lib/{VERSION}/site-packages/thing.py"} <= set(paths)
    assert cli.main([*words, "--most", "2000", "--", "bash", str(pack), "python", "-c", code]) == 0
    said = capfd.readouterr().out
    assert re.search(r"^\d+ calls of 2 ranks; expected at most 2,000$", said, re.MULTILINE)
    assert not re.search(rf" {environment}/(env|elsewhere|on_path)/\S+\.py", said)
    assert cli.main([*words, "--most", "0", "--", "bash", str(pack), "python", "-c", code]) == 1
    assert cli.main([*words, "--launcher", "env", "--", sys.executable, "-c", "print('step 1/1')"]) == 0
    assert re.search(r"^\d+ calls$", capfd.readouterr().out, re.MULTILINE)  # the launcher has its own number of ranks
