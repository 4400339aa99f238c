"""What only a checkout has: the scripts with which jobs are started (mpirun/lib.sh and mpirun/cluster), and benchmarks/."""

import functools
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import collectives
from collectives.launcher import environment_of_program

_ULFM = ("--with-ft", "ulfm")
ROOT = Path(collectives.__file__).parents[1]
"""The folder of the checkout; without one the folder of installed packages."""


def check(command: str) -> None:
    """FileNotFoundError if this package was not imported from a checkout. `command`: the one that starts jobs."""
    if not (ROOT / "mpirun/lib.sh").exists():
        raise FileNotFoundError(
            f"{command}: {ROOT / 'mpirun/lib.sh'} is missing; expected a checkout, whose scripts start the jobs: run "
            f"`python -m mpitrain {command}` in its folder"
        )


def benchmark(name: str, command: str) -> ModuleType:
    """A module of benchmarks/, which is not in the wheel. FileNotFoundError as of `check`."""
    check(command)
    if str(ROOT) not in sys.path:  # first: elsewhere may be another package of this name
        sys.path.insert(0, str(ROOT))
        # for the jobs that it starts
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return import_module(f"benchmarks.{name}")


@functools.cache
def mpirun(num_ranks: int, *, elastic: bool = True) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that starts a job on this host, and its environment, as ./mpirun/train has them. `elastic`: it survives losses."""
    script = '. "$1"; load_mpi; mpi_environment "$2"; printf "%s\\0" "$mpirun"; env -0'
    command = ["bash", "-c", script, "bash", str(ROOT / "mpirun/lib.sh"), str(num_ranks)]
    said = subprocess.run(
        command, env=environment_of_program(), capture_output=True, text=True, check=True, timeout=30
    ).stdout
    path, *pairs = said.rstrip("\0").split("\0")
    environment = dict(pair.split("=", 1) for pair in pairs)
    return (path, *_ULFM[: 2 * elastic], "-np", str(num_ranks)), environment


def cluster(hosts: int, ranks: int, *, elastic: bool = True) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that starts such a job on hosts that are made on this machine."""
    return (*_made(hosts, ranks), "--", *_ULFM[: 2 * elastic]), dict(os.environ)


def supervised_cluster(hosts: int, ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that starts such a job under the supervisor, which runs beside the hosts."""
    start = 'exec "$0" -m mpitrain elastic -- "$CLUSTER_MPIRUN" --with-ft ulfm -H "$CLUSTER_HOSTS" -np "$@"'
    head = ("--on-head", "--", "bash", "-c", start, sys.executable, str(hosts * ranks))
    return (*_made(hosts, ranks), *head), dict(os.environ)


def _made(hosts: int, ranks: int) -> tuple[str, ...]:
    return str(ROOT / "mpirun/cluster"), "run", "-H", f"{hosts}x{ranks}", "--timeout", "600"
