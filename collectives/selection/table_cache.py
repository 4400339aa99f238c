"""Where a measured table is kept: in the user's cache, one file for each machine, MPI library and number of ranks a node and of nodes.

Read by rank 0 when the world communicator is made, written by `python -m collectives tune`. A file that cannot be used is no error: a
line on stderr says so, and the built-in table holds.
"""

import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from collectives.selection.selector import Placement
from collectives.selection.table import VERSION, Table


def folder() -> Path:
    """The cache: MPITRAIN_CACHE_DIR, else $XDG_CACHE_HOME/mpitrain, else ~/.cache/mpitrain."""
    if chosen := os.environ.get("MPITRAIN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mpitrain")


def this_machine(mpi_library: str, placement: Placement) -> dict[str, Any]:
    """What measured figures hold for: nothing here names the host, so that the nodes of one kind share a table."""
    sizes = sorted({placement.smallest_node, placement.largest_node})
    return {
        "table": VERSION,
        "mpi": mpi_library,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "ranks_per_node": sizes,
        "nodes": placement.num_nodes,
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def path_of(machine: dict[str, Any]) -> Path:
    """The file that holds the table for `machine`."""
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"collectives-{key}.json"


def read(machine: dict[str, Any]) -> Table | None:
    """The table measured on `machine`; None where there is none, or, with a line on stderr, none that can be used."""
    path = path_of(machine)
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _ignored(path, error.strerror or str(error))
        return None
    try:
        table = Table.from_dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        _ignored(path, str(error))
        return None
    if table.machine != machine:
        _ignored(path, f"it was measured on another machine, {table.machine}")
        return None
    return table


def _ignored(path: Path, why: str) -> None:
    print(
        f"collectives: {path} is ignored: {' '.join(why.split())}; remove it, or measure anew under this mpirun: "
        "python -m collectives tune",
        file=sys.stderr,
        flush=True,
    )


def write(path: Path, table: Table) -> None:
    """Put `table` into the file `path`, and its folder if need be: whole or not at all, also for who reads it meanwhile. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "w") as file:
            file.write(table.to_json())
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)  # there is no other way to ask for it
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's is 0600; the built-in table is for all to read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
