"""What a pack leaves in a node's memory, whatever ends its processes, and what it says where it cannot be unpacked."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpitrain.tools.doctor.pack.archive import HEADER_BYTES
from tests.helpers.packs import inside, other_head, read, removers, say, small_pack, start, wait_until_removed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pack(tmp_path_factory.mktemp("files") / "env.pack")


@pytest.fixture
def pack(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, to be unpacked in a "node's memory" of its own."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("MPITRAIN_PACK_DIR", str(tmp_path / "memory"))
    return packed


def test_what_was_interrupted_is_no_environment(pack: Path) -> None:
    assert say(pack, "unpack")[0] == 0
    (folder,) = inside()
    folder.rename(folder.with_name(".new.abcdef"))
    assert say(pack, "true")[0] == 0
    wait_until_removed()


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
    assert say(pack, "true")[0] == 0
    wait_until_removed()


def without_variables(folder: Path) -> int:
    """The remover of a folder, when it has none of the variables by which the supervisor finds what to end: soon after its start."""
    end = time.monotonic() + 20
    while True:
        for remover in removers(folder):
            if (its := read(Path(f"/proc/{remover}/environ"))) and b"MPITRAIN_" not in its:
                return remover
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_remover_that_was_killed_is_replaced(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_SUPERVISOR", "abc")  # by which the supervisor ends what a launch has left
    held = [subprocess.Popen(["bash", pack, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in held:
        assert process.stdin and process.stdout
        process.stdin.write(b"started\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"started\n"
    (folder,) = inside()
    remover = without_variables(folder)
    os.kill(remover, signal.SIGKILL)
    for process in held[1:]:
        process.communicate()
    assert say(pack, "true")[0] == 0  # of a later job
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
    end = time.monotonic() + 20
    while not (tmp_path / "began").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert inside()
    process.kill()
    process.communicate()
    wait_until_removed()


def test_the_folder_may_have_the_setgid_bit(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "memory").chmod(0o2755)
    assert say(pack, "unpack")[0] == 0
    assert inside()[0].parent.stat().st_mode & 0o7777 in (0o700, 0o2700)
    assert say(pack, "true")[0] == 0


def test_a_name_that_another_user_has_made_is_passed_over(pack: Path, tmp_path: Path) -> None:
    names = [tmp_path / f"memory/mpitrain-pack-{os.getuid()}{number}" for number in ("", ".1", ".2")]
    for name, kind in zip(names, (Path.touch, Path.mkdir, lambda path: path.symlink_to(tmp_path)), strict=True):
        kind(name)
    names[1].chmod(0o777)
    assert say(pack, "unpack") == (0, "", "")
    (folder,) = names[0].with_name(f"{names[0].name}.3").iterdir()
    names[0].unlink()  # it goes on where it is
    assert say(pack, "sh", "-c", 'cat "$VIRTUAL_ENV/file.txt"; echo "$VIRTUAL_ENV"') == (0, f"read\n{folder}/env\n", "")
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
    code, output, errors = say(pack, "true")
    assert (code, output) == (1, "")
    assert len(errors.splitlines()) == 1, errors
    assert expected and expected in errors, errors
    assert not own.is_dir() or own.is_symlink() or not list(own.iterdir())


def test_wrong_words_are_one_line(pack: Path) -> None:
    for command in ("unpack", "show", "remove"):
        code, output, errors = say(pack, command, "python", "-m", "x")
        assert (code, output) == (1, "") and errors.endswith(
            f"error: {command} takes no further words, got: python -m x\n"
        )
    assert not list(Path(os.environ["MPITRAIN_PACK_DIR"]).iterdir())
    for wrong in ("bogus", "./bogus", "/etc/passwd", "/"):
        code, output, errors = say(pack, wrong, "word")
        assert (code, output) == (127, "")
        assert re.search(
            rf"^env.pack: error: {wrong} is no program of .*; expected a command, unpack, remove or show\n$", errors
        )
    wait_until_removed()
    assert say(pack, "env", "printf", "%s", "a b") == (0, "a b", "")
    assert say(pack, "/bin/sh", "-c", "exit 3") == (3, "", "")
