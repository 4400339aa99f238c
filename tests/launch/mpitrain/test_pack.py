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
from mpitrain.bench import calls  # noqa: F401  # as long as this environment is the one of Python's path
from mpitrain.doctor.pack import command, contents  # noqa: F401
from mpitrain.doctor.pack.archive import HEADER_BYTES

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


def start(pack: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["bash", pack, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def say(pack: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    process = start(pack, *words)
    output, errors = process.communicate(timeout=30)
    return process.returncode, output, errors


def inside() -> list[Path]:
    """What lies in the node's memory."""
    return list(Path(os.environ["MPITRAIN_PACK_DIR"], f"mpitrain-pack-{os.getuid()}").iterdir())


def wait_until_removed() -> None:
    end = time.monotonic() + 10
    while inside():
        assert time.monotonic() < end, inside()
        time.sleep(0.05)


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


def test_what_was_interrupted_is_no_environment(pack: Path) -> None:
    assert say(pack, "unpack")[0] == 0
    (folder,) = inside()
    folder.rename(folder.with_name(".new.abcdef"))
    assert say(pack, "thing")[0] == 0
    wait_until_removed()


@pytest.mark.parametrize("harm", ["flipped", "cut", "no room", "open folder", "link", "machine"])
def test_errors_are_one_line_and_leave_nothing(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("MPITRAIN_PACK_DIR", str(memory))
    pack = tmp_path / "env.pack"
    own = memory / f"mpitrain-pack-{os.getuid()}"
    data = bytearray(packed.read_bytes())
    expected = {"flipped": "SHA-256", "cut": "bytes, found", "no room": "has room for", "machine": "packed on"}.get(
        harm, "must belong"
    )
    match harm:
        case "flipped":
            data[HEADER_BYTES + 700] ^= 1
        case "cut":
            del data[-1000:]
        case "no room":
            size = re.search(rb"\nunpacked=(\d+)\n", data)
            assert size
            taken = b"\nunpacked=9999999999999999\n"
            data = data.replace(size[0], taken, 1)
            del data[60000 : 60000 + len(taken) - len(size[0])]  # of the empty lines behind the script
        case "machine":
            data = data.replace(
                f"\nmachine={os.uname().machine}\n".encode(), f"\nmachine={'m' * len(os.uname().machine)}\n".encode()
            )
        case "open folder":
            own.mkdir()
            own.chmod(0o755)
        case "link":
            (memory / "other").mkdir(mode=0o700)
            own.symlink_to(memory / "other")
            expected = "cannot be made"
    pack.write_bytes(data)
    code, output, errors = say(pack, "thing")
    assert (code, output) == (1, "")
    assert len(errors.splitlines()) == 1, errors
    assert expected in errors, errors
    assert not own.exists() or not list(own.iterdir())


def test_an_old_pack_says_so(pack: Path, environment: Path) -> None:
    later = time.time() + 10
    os.utime(environment / "checkout/mine/__init__.py", (later, later))
    code, _, errors = say(pack, "true")
    os.utime(environment / "checkout/mine/__init__.py", (later - 1e6, later - 1e6))
    assert code == 0
    assert errors == (
        f"env.pack: note: {environment}/checkout/mine/__init__.py has changed since this was packed (1 files in all): to use that, "
        "pack again\n"
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
