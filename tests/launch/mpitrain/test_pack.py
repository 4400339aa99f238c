"""Packs of a small environment: made, unpacked by several processes at once, removed, damaged, and counted by strace."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import suppress
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


def test_what_was_interrupted_is_no_environment(pack: Path) -> None:
    assert say(pack, "unpack")[0] == 0
    (folder,) = inside()
    folder.rename(folder.with_name(".new.abcdef"))
    assert say(pack, "thing")[0] == 0
    wait_until_removed()


def other_head(pack: Path, target: Path, old: str, new: str) -> Path:
    """A pack whose script has another text somewhere, at `target`."""
    data = pack.read_bytes()
    assert data.count(old.encode(), 0, HEADER_BYTES) == 1
    data = data.replace(old.encode(), new.encode(), 1)
    longer = len(new.encode()) - len(old.encode())
    spare = data[60000 : 60000 + max(longer, 0)]  # of the empty lines behind the script
    assert not spare.strip()
    target.write_bytes(data[:60000] + b"\n" * -longer + data[60000 + len(spare) :])
    return target


@pytest.mark.parametrize("harm", ["dead", "new"])
def test_nothing_stays_of_a_removal_or_an_unpack_that_was_killed(pack: Path, harm: str) -> None:
    assert say(pack, "unpack")[0] == 0
    (folder,) = inside()
    left = folder.with_name(f"{folder.name}.dead" if harm == "dead" else ".new.abcdef")
    (left / "env").mkdir(parents=True)
    assert say(pack, "remove") == (0, "", "")
    assert not inside()
    (left / "env").mkdir(parents=True)
    assert say(pack, "remove") == (0, "", "")  # without a whole one
    assert not inside()
    (left / "env").mkdir(parents=True)
    assert say(pack, "thing")[0] == 0
    wait_until_removed()


def removers(folder: Path) -> list[int]:
    """The processes that wait for the end of the last rank."""
    return [
        int(words.parent.name)
        for words in Path("/proc").glob("[0-9]*/cmdline")
        if b".remove-at-end" in (line := read(words)) and os.fsencode(folder.parent) in line
    ]


def read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def test_a_remover_that_was_killed_is_replaced(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_SUPERVISOR", "abc")  # by which the supervisor ends what a launch has left
    held = [subprocess.Popen(["bash", pack, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in held:
        assert process.stdin and process.stdout
        process.stdin.write(b"started\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"started\n"
    (folder,) = inside()
    (remover,) = removers(folder)
    assert b"MPITRAIN_" not in Path(f"/proc/{remover}/environ").read_bytes()
    os.kill(remover, signal.SIGKILL)
    for process in held[1:]:
        process.communicate()
    assert say(pack, "thing")[0] == 0  # of a later job
    assert inside()
    held[0].kill()
    held[0].communicate()
    wait_until_removed()


def test_a_process_that_was_killed_while_it_unpacked_leaves_nothing(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin/tar"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\necho > {tmp_path}/began\nsleep 1\n")
    slow.chmod(0o755)
    process = start(other_head(pack, tmp_path / "env.pack", "PATH=/usr/bin:", f"PATH={slow.parent}:/usr/bin:"), "true")
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert inside()
    wait_until_removed()


def test_the_folder_may_have_the_setgid_bit(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "memory").chmod(0o2755)
    assert say(pack, "unpack")[0] == 0
    assert inside()[0].parent.stat().st_mode & 0o7777 in (0o700, 0o2700)
    assert say(pack, "thing")[0] == 0


def test_a_name_that_another_user_has_made_is_passed_over(pack: Path, tmp_path: Path) -> None:
    names = [tmp_path / f"memory/mpitrain-pack-{os.getuid()}{number}" for number in ("", ".1", ".2")]
    for name, kind in zip(names, (Path.touch, Path.mkdir, lambda path: path.symlink_to(tmp_path)), strict=True):
        kind(name)
    names[1].chmod(0o777)
    assert say(pack, "unpack") == (0, "", "")
    (folder,) = names[0].with_name(f"{names[0].name}.3").iterdir()
    names[0].unlink()  # it goes on where it is
    assert str(folder) in say(pack, "thing")[1]
    assert f"to {folder} (there now)" in say(pack, "show")[1]
    assert say(pack, "remove") == (0, "", "")
    assert not list(folder.parent.iterdir())
    assert not list(names[1].iterdir())


@pytest.mark.parametrize("harm", ["flipped", "cut", "no room", "taken", "machine", "no tar", "tar", "above", "missing"])
def test_errors_are_one_line_and_leave_nothing(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("MPITRAIN_PACK_DIR", str(memory))
    pack = tmp_path / "env.pack"
    own = memory / f"mpitrain-pack-{os.getuid()}"
    data = bytearray(packed.read_bytes())
    data = bytearray(packed.read_bytes())
    expected = {"flipped": "SHA-256", "cut": "bytes, found", "no room": "has room for", "machine": "packed on"}.get(
        harm
    )
    few = tmp_path / "bin"
    few.mkdir()
    match harm:
        case "flipped":
            data[HEADER_BYTES + 700] ^= 1
        case "cut":
            del data[-1000:]
        case "no room":
            size = re.search(rb"\nunpacked=\d+\n", data)
            assert size
            other_head(packed, pack, size[0].decode(), "\nunpacked=9999999999999999\n")
        case "machine":
            other_head(packed, pack, f"machine={os.uname().machine}\n", "machine=m\n")
        case "taken":
            for number in ("", *(f".{number}" for number in range(1, 8))):
                own.with_name(f"{own.name}{number}").symlink_to(tmp_path)
            expected = "must belong to you"
        case "no tar":  # as in a minimal container
            for folder in map(Path, ("/bin", "/usr/bin")):
                for tool in folder.iterdir():
                    if tool.name != "tar" and not (few / tool.name).exists():
                        (few / tool.name).symlink_to(tool)
            other_head(packed, pack, "PATH=/usr/bin:/bin:$PATH", f"PATH={few}")
            expected = "tar is missing"
        case "tar":
            (few / "tar").write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
            (few / "tar").chmod(0o755)
            other_head(packed, pack, "PATH=/usr/bin:", f"PATH={few}:/usr/bin:")
            expected = "it is broken"
        case "above":
            memory.chmod(0o777)
            expected = "others could replace"
        case "missing":
            monkeypatch.setenv("MPITRAIN_PACK_DIR", str(tmp_path / "none"))
            expected = "is no folder"
    if not pack.exists():
        pack.write_bytes(data)
    code, output, errors = say(pack, "thing")
    assert (code, output) == (1, "")
    assert len(errors.splitlines()) == 1, errors
    assert expected and expected in errors, errors
    assert not own.is_dir() or own.is_symlink() or not list(own.iterdir())


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
