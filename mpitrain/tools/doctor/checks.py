"""The list of all checks, in the order in which they run: what each measures, on which ranks, in what time, and who judges it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from collectives import Communicator
from mpitrain.tools.doctor import host, job, network, packages, ranks
from mpitrain.tools.doctor.findings import Finding, each
from mpitrain.tools.doctor.judges.host import judge_disk, judge_leftovers, judge_memory, judge_need, judge_temporary
from mpitrain.tools.doctor.judges.job import judge_mpi, judge_node_work, judge_shared_folder
from mpitrain.tools.doctor.judges.network import judge_clocks, judge_links, judge_ports
from mpitrain.tools.doctor.judges.packages import Aware, judge_gpu, judge_hdf5
from mpitrain.tools.doctor.judges.ranks import judge_cores, judge_environment, judge_limits, judge_names, judge_versions


class DoctorOptions(NamedTuple):
    """What the user asked for. `older_than_s`: the age of copies that `clean` removes; `limit_s`: the most seconds of a check."""

    run: str
    clean: bool
    older_than_s: float
    disk_bytes: int
    limit_s: float


class CheckJob(NamedTuple):
    """The ranks that check. `comm`: None without MPI. `places`: the names of all ranks; `leaders`: the first rank of each host."""

    options: DoctorOptions
    comm: Communicator | None
    places: tuple[str, ...]
    leaders: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.comm.rank if self.comm is not None else 0

    @property
    def ranks_here(self) -> int:
        return self.comm.node.size if self.comm is not None else 1

    @property
    def folder(self) -> Path:
        return Path(self.options.run)


@dataclass(frozen=True)
class Check:
    """One check. `on`: "rank" and "host" measure without MPI, on each rank or on the first one of each host; "job" is collective.

    `measure(job)` returns facts, or None on ranks that have none. `judge` gets the facts by name of the rank or host.
    """

    name: str
    group: str
    on: Literal["rank", "host", "job"]
    measure: Callable[[CheckJob], Any]
    judge: Callable[[Mapping[str, Any]], list[Finding]]
    limit_s: float = 10.0
    remedy: str = "run the doctor on that host alone, and look at what the system logs (dmesg)"


_NETWORK = (
    "name the network that all hosts share (--mca btl_tcp_if_include NAME; MPICH: -iface NAME), and open its ports "
    "between the hosts"
)


class GpuFacts(NamedTuple):
    """The GPUs of a host, whether MPI takes their addresses, and the number of ranks there."""

    gpu: packages.Gpu
    aware: Aware | None
    num_ranks: int


def _gpu(its: CheckJob) -> GpuFacts:
    aware = None
    if its.comm is not None:
        from collectives.transports.gpu import cuda  # needs MPI

        aware = Aware(*cuda.support())
    return GpuFacts(packages.ask_gpu(), aware, its.ranks_here)


class MemoryFacts(NamedTuple):
    """The node memory of a host, the need of the run whose settings are in the run's folder, and the most that the host gives it."""

    memory: host.Memory
    need: packages.Need
    most: host.Most


def _memory(its: CheckJob) -> MemoryFacts:
    settings, need = its.folder / "config.toml", packages.Need()
    if settings.exists() and its.comm is not None:
        need = packages.ask_need(settings, its.comm.size, its.comm.num_nodes)
    return MemoryFacts(host.node_memory(), need, host.most_memory())


def _first(judge: Callable[[Any], list[Finding]]) -> Callable[[Mapping[str, Any]], list[Finding]]:
    """The judge of facts that are the same on all ranks."""
    return lambda facts: judge(next(iter(facts.values())))


def _comm(its: CheckJob) -> Communicator:
    assert its.comm is not None, "a check of the job needs MPI"
    return its.comm


CHECKS = (
    Check("MPI", "MPI", "job", lambda its: job.mpi(_comm(its)), judge_mpi, 20.0),
    Check("environment", "MPI", "rank", lambda _: ranks.environment(), each(judge_environment)),
    Check("versions", "Installation", "host", lambda _: ranks.versions(), judge_versions, 30.0),
    Check("HDF5", "Installation", "host", lambda _: packages.ask_hdf5(), each(judge_hdf5), 70.0),
    Check("GPU", "Installation", "host", _gpu, each(lambda its: judge_gpu(*its)), 70.0),
    Check("cores", "Node", "rank", lambda _: ranks.cores(), judge_cores),
    Check("limits", "Node", "host", lambda _: ranks.limits(), each(judge_limits)),
    Check(
        "node memory",
        "Node",
        "host",
        _memory,
        each(lambda its: judge_memory(its.memory, its.need) + judge_need(its.need, its.most)),
        70.0,
    ),
    Check(
        "shared arrays",
        "Node",
        "job",
        lambda its: job.node_work(_comm(its)),
        lambda facts: _by_host(judge_node_work, facts),
        20.0,
        "see the findings of node memory",
    ),
    Check(
        "old files",
        "Node",
        "host",
        lambda its: host.leftovers(clean=its.options.clean, older_than_s=its.options.older_than_s),
        each(judge_leftovers),
        20.0,
    ),
    Check("temporary files", "Node", "host", lambda _: host.temporary(), each(judge_temporary)),
    Check(
        "run's folder",
        "Disk",
        "host",
        lambda its: host.disk(its.folder, its.options.disk_bytes, 3.0),
        each(judge_disk),
        30.0,
        "the file system does not answer: ask who runs it (a dead NFS server?), or choose another folder by --run DIR",
    ),
    Check(
        "same folder",
        "Disk",
        "job",
        lambda its: job.shared_folder(_comm(its), its.folder, is_leader=its.rank in its.leaders),
        judge_shared_folder,
        20.0,
        "the file system does not answer: ask who runs it, or choose another folder by --run DIR",
    ),
    Check(
        "host names",
        "Network",
        "host",
        lambda _: ranks.own_name(),
        judge_names,
        20.0,
        "the name service does not answer",
    ),
    Check("clocks", "Network", "job", lambda its: network.clock(_comm(its), its.leaders), judge_clocks, 30.0, _NETWORK),
    Check(
        "links",
        "Network",
        "job",
        lambda its: network.links(_comm(its), its.leaders, its.places),
        _first(judge_links),
        60.0,
        _NETWORK,
    ),
    Check(
        "TCP ports",
        "Network",
        "job",
        lambda its: network.ports(_comm(its), its.leaders, its.places),
        _first(judge_ports),
        60.0,
        _NETWORK,
    ),
)


def _by_host(judge: Callable[[Any], list[Finding]], facts: Mapping[str, Any]) -> list[Finding]:
    """The judgement of the first rank of each host."""
    firsts: dict[str, Any] = {}
    for place, its in facts.items():
        firsts.setdefault(place.rpartition(" on ")[2], its)
    return each(judge)(firsts)
