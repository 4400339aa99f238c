"""The version of this package, the commit of its sources, and a hash of them: what ranks compare, and what reports name.

setup.py loads this file by its path to write the commit into a build. So it imports the standard library alone.
"""

import functools
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VERSION = "0.1.0"
PACKAGES = ("collectives", "ckpt", "mpitrain")
COMMIT_FILE = "collectives/commit.txt"
"""The file, in a build, that has the commit from which it was built."""

UNKNOWN = "unknown"
_BEGAN_S = time.time()  # this process has loaded its sources since then
_ROOT = Path(__file__).resolve().parents[1]
_SUFFIXES = (".py", ".c", ".h", ".json", ".toml")


class Release(NamedTuple):
    """What the sources say of themselves. `commit`: 40 hexadecimal digits, or "unknown"."""

    version: str
    commit: str

    def __str__(self) -> str:
        return f"{self.version} (commit {self.commit[:10]})"


@functools.cache
def release() -> Release:
    """The version and the commit of this package, as of the first call."""
    return Release(VERSION, commit_of(_ROOT))


def commit_of(root: Path) -> str:
    """The commit of the sources in the folder `root`: of its checkout, else as the build has written it, else "unknown".

    Changes that were not committed do not count: see `sources`.
    """
    for find in (_checked_out, _built):
        with suppress(OSError, UnicodeDecodeError):
            if re.fullmatch("[0-9a-f]{40,64}", commit := find(root)):
                return commit
    return UNKNOWN


def sources(root: Path = _ROOT) -> bytes:
    """A hash, 8 bytes, of the names and sizes of the sources of all packages in the folder `root`. It opens no file: some 2 ms."""
    found = sorted(f"{path[len(str(root)) :]} {status.st_size}\n" for path, status in _files(root))
    return hashlib.blake2b("".join(found).encode(), digest_size=8).digest()


def loaded_sources() -> bytes:
    """`sources`, or 8 bytes of this process alone if it may have loaded older ones: the commit and a file have changed meanwhile."""
    if commit_of(_ROOT) != release().commit and any(status.st_mtime > _BEGAN_S for _, status in _files(_ROOT)):
        return os.urandom(8)
    return sources(_ROOT)


def place() -> bytes:
    """A hash, 8 bytes, of the host and the folder of this package. Processes with the same one have the same files."""
    there = os.stat(_ROOT / "collectives")
    # Hosts may have one name, and containers one path.
    words = (os.uname().nodename, str(_ROOT), there.st_dev, there.st_ino)
    return hashlib.blake2b(repr(words).encode(), digest_size=8).digest()


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The paths and states of the sources of all packages in the folder `root`."""
    folders = [f"{root}/{package}" for package in PACKAGES]
    while folders:
        folder = folders.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIXES):
                    yield entry.path, entry.stat()
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)


def _checked_out(root: Path) -> str:
    """What HEAD of the checkout in `root` names, without git, which a compute node may not have."""
    folder = root / ".git"
    if folder.is_file():  # of a worktree or a submodule
        folder = root / folder.read_text().removeprefix("gitdir:").strip()
    head = (folder / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    shared = folder
    with suppress(OSError):
        shared = folder / (folder / "commondir").read_text().strip()
    with suppress(OSError):
        return (shared / name).read_text().strip()
    lines = (shared / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")


def _built(root: Path) -> str:
    return (root / COMMIT_FILE).read_text().strip()
