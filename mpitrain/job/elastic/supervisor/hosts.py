"""The hosts of a job, as mpirun, Slurm and PBS name them. Pure, except that `scontrol` expands Slurm's lists, and a file is read."""

import functools
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Host(NamedTuple):
    """A host, and the number of ranks that it takes."""

    name: str
    slots: int


_NAME = re.compile(r"(?:[\w.+-]+@)?[\w+\[][\w.:%+-]*\]?", re.ASCII)
"""Names become words of commands, such as ssh and srun: one that begins with "-" would be an option, as of `ssh -oProxyCommand=...`."""
_DEFAULT_HOST_FILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE")


def parse_list(text: str) -> list[Host]:
    """Hosts of mpirun's `-H a:2,b,b`: a host that is named twice takes two ranks. ValueError for an empty name or a wrong number."""
    found: dict[str, int] = {}
    for word in text.split(","):
        name, colon, slots = word.strip().rpartition(":") if re.search(r":\d*$", word) else (word.strip(), "", "1")
        if not name or (colon and not slots.isdigit()):
            raise ValueError(f"expected hosts such as node1:4,node2:4, got {text!r}")
        found[_checked(name)] = found.get(name, 0) + int(slots)
    return [Host(name, slots) for name, slots in found.items()]


def _checked(name: str) -> str:
    """The name of a host. ValueError if it could be anything else in a command."""
    if name.startswith("-") or not _NAME.fullmatch(name):
        raise ValueError(f"expected names of hosts, such as node1 or node1.site, got {name!r}")
    return name


def parse_file(text: str) -> list[Host]:
    """Hosts of a hostfile: `node1 slots=4` for Open MPI, `node1:4` for MPICH, and repeated lines as in $PBS_NODEFILE."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = parse_list(words[0])[0]
        slots = next((int(word[6:]) for word in words[1:] if re.fullmatch(r"slots=\d+", word)), host.slots)
        found[host.name] = found.get(host.name, 0) + slots
    return [Host(name, slots) for name, slots in found.items()]


def expand_tasks(text: str) -> list[int]:
    """Numbers of tasks of Slurm's SLURM_TASKS_PER_NODE: `4(x2),3` is 4, 4, 3."""
    numbers: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE: expected numbers such as 4(x2),3, got {text!r}")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def expand_names(text: str) -> list[str]:
    """The hosts in a list of Slurm such as n[1-3],m1. ValueError if Slurm does not know the form."""
    if text.startswith("-"):
        raise ValueError(f"expected names of hosts, such as node[1-4], got {text!r}")
    command = ["scontrol", "show", "hostnames", text]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"the hosts of this Slurm job are not known: {' '.join(command)}: {error}") from None


def of_environment(environ: Mapping[str, str]) -> list[Host]:
    """The hosts of the allocation of Slurm or PBS that this process is in, or of mpirun's default hostfile; else empty."""
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        names = expand_names(nodes)
        tasks = expand_tasks(environ.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})"))
        if len(tasks) != len(names):
            raise ValueError(f"Slurm names {len(names)} nodes, but SLURM_TASKS_PER_NODE has {len(tasks)} numbers")
        return [Host(_checked(name), slots) for name, slots in zip(names, tasks, strict=True)]
    for variable in ("PBS_NODEFILE", *_DEFAULT_HOST_FILES):
        if file := environ.get(variable):
            try:
                return parse_file(Path(file).read_text())
            except OSError as error:
                raise ValueError(f"{variable} {file}: {error.strerror}") from None
    return []


def as_list(hosts: Iterable[Host]) -> str:
    """The hosts in the form of `-H`."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def choose(hosts: Sequence[Host], answering: Iterable[str], most: int | None) -> list[Host]:
    """The hosts of the next launch: those that answer, in the order of the list, and no more than `most`."""
    live = set(answering)
    return [host for host in hosts if host.name in live][:most]


def num_ranks(asked: int | None, all_hosts: Sequence[Host], chosen: Sequence[Host]) -> int | None:
    """The number of ranks on the chosen hosts: as asked where they have the slots, else all their slots. A job that was asked to have
    more ranks than there are slots keeps the ratio. None, which leaves the number to mpirun, if none was asked for."""
    if asked is None:
        return None
    slots, total = sum(host.slots for host in chosen), sum(host.slots for host in all_hosts)
    if asked <= slots:
        return asked
    return max(1, slots if asked <= total else asked * slots // total)


@functools.cache
def is_own(name: str) -> bool:
    """Whether a name is of the host of this process. A long name is so if its address is one of this host's."""
    own = os.uname().nodename
    if name in ("localhost", "127.0.0.1", own, own.partition(".")[0]):
        return True
    if "." not in name:
        return False
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as own_socket:
            own_socket.bind(address)  # only to an address of this host
    except OSError:
        return False
    return True
