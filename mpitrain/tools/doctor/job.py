"""Measures what the ranks of a job share: MPI itself, the memory of a node, the run's folder. Collective, over MPI.

A check that hangs is ended by doctor_command.py, from outside.
"""

import fcntl
import os
import secrets
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

import collectives
from collectives import Communicator
from collectives.commands.installation import mpi_facts
from collectives.launcher import ULFM_VARIABLE, environment_of_program, launcher_name
from mpitrain.tools.doctor import ranks
from mpitrain.tools.doctor.beforehand import existing

PML = "OMPI_MCA_pml"  # a setting of Open MPI that mpirun passes to ranks


class Mpi(NamedTuple):
    """MPI as a rank sees it.

    `launcher`: the launcher of this job, without one the mpirun on the PATH; `launcher_libraries`: the folder of its libraries, if it
    tells; `ft_enabled`, `pml`: settings of Open MPI.
    """

    version: str
    standard: str
    threads: str
    paths: tuple[str, ...]
    has_ulfm: bool
    ucx_is_loaded: bool
    has_progress_thread: bool
    size: int
    num_nodes: int
    launched: bool
    launcher: str
    launcher_path: str
    launcher_libraries: str
    ft_enabled: str
    pml: str


def mpi(comm: Communicator) -> Mpi:
    facts = mpi_facts()
    path = shutil.which("mpirun") or shutil.which("mpiexec") or ""
    launched = collectives.launched_rank() >= 0
    return Mpi(
        *facts,
        has_progress_thread=comm.has_progress_thread,
        size=comm.size,
        num_nodes=comm.num_nodes,
        launched=launched,
        launcher=launcher_name() if launched else launcher_version(path) if path else "",
        launcher_path=path,
        launcher_libraries=os.path.realpath(told) if (told := os.environ.get("OMPI_LIBDIR_LOC")) else "",
        ft_enabled=os.environ.get(ULFM_VARIABLE, ""),
        pml=os.environ.get(PML, ""),
    )


def launcher_version(path: str) -> str:
    """The line of `mpirun --version` that has the version."""
    clean = environment_of_program() | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        said = subprocess.run([path, "--version"], env=clean, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"no answer ({error})"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    numbers = [line for line in lines if line.startswith("Version:")]
    return f"{lines[0].rstrip(':')} {numbers[0].split()[-1]}" if numbers else (lines[0] if lines else "no answer")


class NodeWork(NamedTuple):
    """Whether the ranks of a node can share an array, and read each other's private memory."""

    size: int
    shared: str
    reads_peers: bool
    rules: ranks.PeerReads


def node_work(comm: Communicator) -> NodeWork:
    """Share a small array within each node. Collective."""
    node, failure = comm.node, ""
    try:
        array = node.shared(node.size, np.int64)
        array[node.rank] = node.rank + 1
        node.barrier()
        if array.tolist() != list(range(1, node.size + 1)):
            failure = f"rank {comm.rank} sees {array.tolist()} in an array in which the ranks wrote 1 to {node.size}"
        node.barrier()
    except OSError as error:  # on all ranks of the node
        failure = str(error)
    return NodeWork(node.size, failure, node.reads_peers, ranks.peer_reads())


class SharedFolderCheck(NamedTuple):
    """Whether a host sees, within some seconds, a file that rank 0 wrote, and is refused a lock that rank 0 holds."""

    folder: str
    sees: bool
    lock_is_seen: bool


def shared_folder(comm: Communicator, folder: Path, *, is_leader: bool, max_s: float = 3.0) -> SharedFolderCheck | None:
    """A value on the first rank of each host. Collective."""
    name, held = f".mpitrain-doctor-{secrets.token_hex(8)}", None
    name, place = comm.broadcast_object((name, existing(folder)))
    path = place / name
    if comm.rank == 0:
        with suppress(OSError):
            held = path.open("xb")
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    comm.barrier()
    sees = locked = False
    if is_leader:
        end = time.monotonic() + max_s
        while not (sees := path.exists()) and time.monotonic() < end:
            with suppress(OSError):
                os.listdir(place)  # asks a network file system again
            time.sleep(0.05)
        if sees:
            with suppress(OSError), path.open("rb+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    locked = True
    comm.barrier()
    if held is not None:
        held.close()
        path.unlink()
    return SharedFolderCheck(str(place), sees, locked) if is_leader else None
