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
_N = "([0-9]{1,9})"
_NUMBERS = re.compile(
    rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}}){{0,5}})(?:(a|b|rc){_N})?(?:\.post{_N})?(?:\.dev{_N})?(?:\+[a-z0-9.]{{1,40}})?"
)
"""A version of Python's packages, in its normal form."""
_TOLD = re.compile(rf"({_NUMBERS.pattern}) \(commit ([0-9a-f]{{7,64}}|{UNKNOWN})\)")


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


def newer_release(told: object) -> Release | None:
    """The release whose `str` a file tells, if its version is newer than that of this package. None also for anything else there: the
    file may be a stranger's."""
    found = _TOLD.fullmatch(told) if isinstance(told, str) else None
    if found is None or _order(found[1]) <= _order(VERSION):
        return None
    return Release(found[1], found[found.re.groups])


def _order(version: str) -> tuple[object, ...]:
    """A key of the order of versions: 1.0.dev1, 1.0a1, 1.0rc1, 1.0, 1.0.post1, 1.1. It knows each version that `_NUMBERS` matches."""
    found = _NUMBERS.fullmatch(version)
    assert found is not None
    numbers = [int(each) for each in found[1].split(".")]
    while numbers and not numbers[-1]:  # 1.0 is 1
        numbers.pop()
    post, dev = (-1 if each is None else int(each) for each in found.group(4, 5))
    final = "" if dev >= 0 and post < 0 else "z"
    return (numbers, found[2] or final, int(found[3] or 0), post, dev if dev >= 0 else 10**9)


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
