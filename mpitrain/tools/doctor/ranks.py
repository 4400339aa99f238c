"""Measures the environment of a rank: versions, settings, limits, cores, its host's name. No function here judges."""

import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import xxhash

import collectives
from collectives import version
from collectives.cgroup import groups_of, smallest_limit
from collectives.diagnosis.ring.addresses import chosen
from collectives.environment import CHOICES
from collectives.files import other_replacer

FOLDERS = ("MPITRAIN_SHM_DIR", "MPITRAIN_PACK_DIR")
"""The variables that name a folder that must be there."""
PACKAGES = ("torch", "numpy", "mpi4py", "h5py")


class Versions(NamedTuple):
    """The versions in the environment of a rank. `lowest`: what this project needs; `code`: a hash of its sources; `release`: what
    they say of themselves."""

    python: str
    packages: dict[str, str]
    lowest: dict[str, str]
    code: str
    place: str
    release: str = ""


def versions() -> Versions:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    lowest = {}
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("mpitrain") or ():
            if match := re.fullmatch(r"([\w-]+)>=([\d.]+)", line):
                lowest[match[1]] = match[2]
    root = Path(collectives.__file__).parents[1]
    code = xxhash.xxh3_64()
    for package in version.PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            code.update(path.read_bytes())
    return Versions(platform.python_version(), found, lowest, code.hexdigest(), str(root), str(version.release()))


class Environment(NamedTuple):
    """Settings in environment variables. `wrong`: those of this library whose value is unknown; `places`: what is wrong with those that
    name folders or addresses that are not on this host, by name."""

    wrong: dict[str, str]
    places: dict[str, str]


def environment() -> Environment:
    values = {name: os.environ.get(name, "") for name in CHOICES}
    wrong = {name: value for name, value in values.items() if value not in ("", "auto", *CHOICES[name])}
    places = {name: said for name in FOLDERS if (said := _wrong_folder(os.environ.get(name, "")))}
    try:
        chosen()
    except ValueError as error:
        places["MPITRAIN_LISTEN"] = str(error).removeprefix("MPITRAIN_LISTEN ")
    return Environment(wrong, places)


def _wrong_folder(value: str) -> str:
    """What is wrong with a variable that names a folder, such as "is 'shm', which is no full path"; "" if nothing is."""
    if not value:
        return ""
    if not os.path.isabs(value):
        return f"is {value!r}, which is no full path"
    if not os.path.isdir(value):
        return f"is {value!r}, which is {'no folder' if os.path.lexists(value) else 'missing'}"
    if not os.access(value, os.W_OK | os.X_OK):
        return f"is {value!r}, to which this user may not write"
    if why := other_replacer(os.path.join(value, "mpitrain")):
        return f"is {value!r}, in which others can replace files: {why}; expected a folder that they cannot write to, or a sticky one"
    return ""


class ProcessLimits(NamedTuple):
    """Limits of the processes on a host. -1: no limit. `memory`: the smallest one of the cgroups; `cpus`: the quota, 0 for none."""

    open_files: int
    locked: int
    has_rdma: bool
    memory: int
    physical: int
    available: int
    cpus: float


def limits() -> ProcessLimits:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    info = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            info[name] = int(rest.split()[0]) * 1024
    rdma = Path("/sys/class/infiniband")
    memory_limit = smallest_limit(groups_of())
    return ProcessLimits(
        files,
        locked,
        rdma.is_dir() and any(rdma.iterdir()),
        -1 if memory_limit is None else memory_limit,
        info.get("MemTotal", 0),
        info.get("MemAvailable", 0),
        _quota(),
    )


def _quota() -> float:
    """The smallest quota of cores of this process's cgroups, 0 for none."""
    quotas: list[float] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            roots = (
                ["/sys/fs/cgroup"] if not controllers else [f"/sys/fs/cgroup/{each}" for each in (controllers, *names)]
            )
            for root in roots:
                at = Path(root + path)
                for folder in (at, *at.parents):
                    if not str(folder).startswith(root):
                        break
                    with suppress(OSError, ValueError):
                        quota, period = (folder / "cpu.max").read_text().split()
                        quotas.append(int(quota) / int(period))
                    with suppress(OSError, ValueError):
                        if (micros := int((folder / "cpu.cfs_quota_us").read_text())) > 0:
                            quotas.append(micros / int((folder / "cpu.cfs_period_us").read_text()))
    return min(quotas, default=0.0)


class Cores(NamedTuple):
    """The cores of a rank. `threads`: OMP_NUM_THREADS, 0 if it is unset. `yields`: a waiting rank gives its core away. `quota`: the
    number of cores that the cgroup allows, 0 for any."""

    allowed: tuple[int, ...]
    on_host: int
    threads: int
    yields: bool
    quota: float


def cores(environ: Mapping[str, str] = os.environ) -> Cores:
    threads = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    yields = environ.get("OMPI_MCA_mpi_yield_when_idle") == "1" or "MPIR_CVAR_POLLS_BEFORE_YIELD" in environ
    return Cores(
        allowed=tuple(sorted(os.sched_getaffinity(0))),
        on_host=os.cpu_count() or 1,
        threads=int(threads) if threads.isdigit() else 0,
        yields=yields,
        quota=_quota(),
    )


class Names(NamedTuple):
    """The name of a host, its own addresses by that name, and whether the name has none."""

    name: str
    addresses: tuple[str, ...]
    failure: str


def own_name() -> Names:
    name = os.uname().nodename
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        return Names(name, tuple(sorted(found)), "")
    except OSError as error:
        return Names(name, (), error.strerror or str(error))


class PeerReads(NamedTuple):
    """What decides whether a process may read the memory of another: Yama's ptrace_scope (-1: no Yama), and the user's switch."""

    yama: int
    switch: str
    kernel: str


def peer_reads() -> PeerReads:
    yama = -1
    with suppress(OSError, ValueError):
        yama = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    return PeerReads(yama, os.environ.get("MPITRAIN_PEER_READS", ""), f"{sys.platform} {os.uname().release}")
