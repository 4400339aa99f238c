"""Audits a checkpoint's HDF5 files for other tools, in a child process, which may crash or hang: see audit.py."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ckpt.format.hdf5 import INDEX_NAME
from ckpt.format.manifest import CheckpointError
from ckpt.storage.catalog import read_manifest
from ckpt.storage.child import environment, signal_name
from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import local_path
from collectives.programs import import_paths

_TIMEOUT_S = 60.0
_BLOCKS_PER_S = 1000
_MAX_ANSWER_BYTES = 64 << 20

# The child has the module path of this process; with -I Python ignores the environment.
_CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2]) + 5))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
sys.path[:] = json.loads(sys.argv[4])
from ckpt.check.audit import main
main()
"""


def look(path: str | os.PathLike[str], *, timeout_s: float | None = None) -> list[tuple[str, str | None, str]]:
    """The problems that other tools would have with the HDF5 files of the checkpoint `path`, each as (file, tensor or None, problem).

    The index and the data files must agree with the manifest and have nothing else: the same names, types, shapes and places; only
    sources in this checkpoint's own files; no soft or external links, no raw data in other files, no filters, no references, no object
    with two names. No data are read. If HDF5 crashes on a file, or takes longer than `timeout_s` in all (None: a minute, and a second
    for each 1,000 blocks), this is a finding, too. The function starts a Python process without the launcher's variables.

    CheckpointError if the manifest cannot be used, ValueError for a URL.
    """
    folder = need_folder(path)
    manifest = read_manifest(folder)
    if timeout_s is None:
        timeout_s = _TIMEOUT_S + sum(len(tensor.blocks) for tensor in manifest.tensors.values()) / _BLOCKS_PER_S
    names = {file.name for file in manifest.files}
    strangers = sorted(name for name in os.listdir(folder) if name.endswith(".h5") and name not in names)
    found: list[tuple[str, str | None, str]] = [
        (name, None, "belongs to no checkpoint: the manifest does not name it") for name in strangers
    ]
    if INDEX_NAME not in names:
        found.append((INDEX_NAME, None, "is not in the manifest"))
    answers, end = _ask(folder, timeout_s)
    found += [(file, tensor, problem) for file, tensor, problem in answers if problem is not None]
    if end is not None:
        found.append((answers[-1][0] if answers else INDEX_NAME, None, end))
    return found


def need_folder(path: str | os.PathLike[str]) -> LocalPath:
    """The absolute path of a folder for HDF5; ValueError for a URL."""
    return local_path(path, "path", "a folder: HDF5 opens no URLs, so copy the checkpoint to a disk first")


def _ask(folder: Path, timeout_s: float) -> tuple[list[tuple[str, str | None, str | None]], str | None]:
    """The findings of the child, and a message if it crashed or took too long."""
    arguments = [str(folder), str(int(timeout_s) + 1), str(_MAX_ANSWER_BYTES), json.dumps(import_paths())]
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        try:
            code = subprocess.run(
                [sys.executable, "-I", "-c", _CHILD, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=complained,
                env=environment(),
                timeout=timeout_s,
                check=False,
            ).returncode
            end = f"HDF5 crashes on it: {signal_name(-code)}" if code < 0 else None
        except subprocess.TimeoutExpired:
            code, end = 0, f"HDF5 was not done with it after {timeout_s:.0f} s"
        said.seek(0)
        lines = said.read().splitlines()
        if code > 0:
            complained.seek(0)
            last = complained.read()[-300:].decode(errors="replace").strip().splitlines()
            raise CheckpointError(f"{folder}: its HDF5 files could not be looked at: {last[-1:]}")
    # The last line may be cut off if the child was killed.
    return [tuple(json.loads(line)) for line in lines if line.endswith(b"]")], end
