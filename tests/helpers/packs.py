"""Packs in tests: small ones, their scripts, and what lies in the "node's memory" that MPITRAIN_PACK_DIR names."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from mpitrain.tools.doctor.pack import archive
from mpitrain.tools.doctor.pack.archive import HEADER_BYTES
from mpitrain.tools.doctor.pack.contents import SOURCES, Entry, PackLayout


def small_pack(path: Path) -> Path:
    """A pack of one file, which has no Python, at `path`."""
    layout = PackLayout([], [], "env", "", own_mpi=False, sources=[])
    entries = [Entry("env/file.txt", Path(), text=b"read\n"), Entry(SOURCES, Path(), text=b"")]
    archive.write(path, entries, layout, was="/nowhere", about="a small one", tell=lambda _: None)
    return path


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
