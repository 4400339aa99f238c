"""The files of measured tables in the user's cache: one for each machine, MPI library, number of ranks on a node, and number of nodes.

`python -m collectives tune` writes a file; rank 0 reads it when the world communicator is made. A file that cannot be used is not an
error: a line on stderr reports it, and the built-in table is used.
"""

import hashlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from collectives.environment import cache_folder
from collectives.selection.selector import Placement
from collectives.selection.table import VERSION, Table


def this_machine(mpi_library: str, placement: Placement) -> dict[str, Any]:
    """The machine for which measurements are valid. It has no host name, so that nodes of the same kind share a table."""
    sizes = sorted({placement.smallest_node, placement.largest_node})
    return {
        "table": VERSION,
        "mpi": mpi_library,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "ranks_per_node": sizes,
        "nodes": placement.num_nodes,
    }


def cpu_model() -> str:
    """The name of the processor, as far as the system tells it."""
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
    return cache_folder() / f"collectives-{key}.json"


def read(machine: dict[str, Any]) -> Table | None:
    """The table measured on `machine`; None without a file, or, with a line on stderr, if the file cannot be used."""
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
        f"collectives: {path} is ignored: {' '.join(why.split())}; remove it, or measure again under this mpirun: "
        "python -m collectives tune",
        file=sys.stderr,
        flush=True,
    )


def write(path: Path, table: Table) -> None:
    """Write `table` to the file `path` atomically, also for concurrent readers; makes the folder if necessary. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "w") as file:
            file.write(table.to_json())
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)  # the only way to read the mask is to set it
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp's mode is 0600, but all users may read the built-in table
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
