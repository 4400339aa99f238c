"""Judges the environment of ranks: versions, limits, cores, names, settings. Pure: facts in, findings out."""

from collections.abc import Mapping

from collectives.environment import CHOICES
from collectives.texts import show_bytes
from mpitrain.tools.doctor.findings import Finding, Level, merge, names, ok
from mpitrain.tools.doctor.ranks import Cores, Environment, Names, ProcessLimits, Versions

_MIN_FILES = 1024


def judge_environment(its: Environment) -> list[Finding]:
    """The switches and choices of this library, and the folders and addresses that it is told."""
    findings = []
    if its.wrong:
        said = ", ".join(f"{name}={value!r}" for name, value in its.wrong.items())
        expected = "; ".join(dict.fromkeys(f"{', '.join(CHOICES[name])} or auto" for name in its.wrong))
        remedy = f"unset {' '.join(its.wrong)}"
        findings.append(Finding(Level.ERROR, "environment", f"{said}: no job starts", expected, remedy))
    for name, said in its.places.items():
        found, _, expected = said.partition("; expected ")
        expected = expected or "the full path of a folder of this host that this user may write to"
        findings.append(
            Finding(Level.ERROR, "environment", f"{name} {found}", expected, f"unset {name}, or let it name such a one")
        )
    return findings or [ok("environment", "no wrong switches, folders or addresses")]


def judge_versions(facts: Mapping[str, Versions]) -> list[Finding]:
    """The versions of all hosts: present, new enough, and the same."""
    findings = []
    first_place, first = next(iter(facts.items()))
    for name, lowest in first.lowest.items():
        for place, its in facts.items():
            have = its.packages.get(name, "absent")
            if have == "" or (have != "absent" and _numbers(have) < _numbers(lowest)):
                findings.append(
                    Finding(
                        Level.ERROR,
                        name,
                        f"version {have}" if have else "not installed",
                        f"{lowest} or newer",
                        f"pip install '{name}>={lowest}'",
                        where="" if len(facts) == 1 else place,
                    )
                )
    for topic, values in (
        ("Python", {place: its.python for place, its in facts.items()}),
        *((name, {place: its.packages[name] for place, its in facts.items()}) for name in first.packages),
    ):
        if others := {place: value for place, value in values.items() if value != values[first_place]}:
            place, value = next(iter(others.items()))
            findings.append(
                Finding(
                    Level.WARNING,
                    topic,
                    f"{values[first_place] or 'absent'} on {first_place}, {value or 'absent'} on {place}"
                    + (f", {len(others)} differ" if len(others) > 1 else ""),
                    "the same version everywhere",
                    "use one environment for all hosts, on a shared file system or as one container image",
                )
            )
    if strangers := [place for place, its in facts.items() if its.code != first.code]:
        findings.append(
            Finding(
                Level.ERROR,
                "mpitrain",
                f"its sources on {names(strangers)} ({_shown(facts[strangers[0]])}) differ from those on {first_place} "
                f"({_shown(first)})",
                "the same sources everywhere: ranks must issue the same collectives",
                "install the same commit on all hosts",
            )
        )
    if not findings:
        packages = ", ".join(f"{name} {version}" for name, version in first.packages.items())
        same = f"; the same on {len(facts)} hosts" if len(facts) > 1 else ""
        findings.append(ok("versions", f"mpitrain {first.release}, Python {first.python}, {packages}{same}"))
    return findings


def _shown(its: Versions) -> str:
    return f"{its.release} in {its.place}"


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of 2.13.0+cpu."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def judge_limits(its: ProcessLimits) -> list[Finding]:
    """The limits of processes."""
    findings = []
    if 0 <= its.open_files < _MIN_FILES:
        findings.append(
            Finding(
                Level.WARNING,
                "open files",
                f"ulimit -n is {its.open_files}",
                f"{_MIN_FILES} or more: MPI needs a socket for each rank",
                "ulimit -n 65536 before mpirun, or nofile in /etc/security/limits.conf",
            )
        )
    if its.has_rdma and its.locked >= 0:
        findings.append(
            Finding(
                Level.WARNING,
                "locked memory",
                f"ulimit -l is {show_bytes(its.locked)}, and this host has an RDMA network",
                "unlimited: the network registers its buffers",
                "ulimit -l unlimited, memlock in /etc/security/limits.conf; Slurm: LimitMEMLOCK=infinity for slurmd",
            )
        )
    total = its.memory if 0 <= its.memory < its.physical else its.physical
    of_cgroup = f", limited by the cgroup to {show_bytes(its.memory)}" if total == its.memory else ""
    memory = f"{show_bytes(its.available)} of {show_bytes(its.physical)} available{of_cgroup}"
    if total and min(its.available, total) < 1 << 30:
        findings.append(
            Finding(
                Level.WARNING,
                "memory",
                memory,
                "1 GiB or more: a rank needs about half before it has a model",
                "ask the batch system or the container for more (--mem, docker run --memory, resources.limits.memory)",
            )
        )
    if not findings:
        quota = f", {its.cpus:g} cores by quota" if its.cpus else ""
        locked = "unlimited" if its.locked < 0 else show_bytes(its.locked)
        findings.append(ok("limits", f"memory {memory}; open files {its.open_files}; locked memory {locked}{quota}"))
    return findings


def judge_cores(ranks: Mapping[str, Cores]) -> list[Finding]:
    """The cores of the ranks of all nodes. The names of the ranks end with " on HOST"."""
    nodes: dict[str, dict[str, Cores]] = {}
    for rank, its in ranks.items():
        nodes.setdefault(rank.rpartition(" on ")[2], {})[rank] = its
    return merge({node: _judge_node(its) for node, its in nodes.items()})


def _judge_node(ranks: Mapping[str, Cores]) -> list[Finding]:
    allowed = [set(its.allowed) for its in ranks.values()]
    everything = set.union(*allowed)
    number, first = len(ranks), next(iter(ranks.values()))
    quota = first.quota
    have = min(len(everything), quota) if quota else len(everything)
    words = f"{number} rank{'s' * (number > 1)} on {len(everything)} of {first.on_host} cores"
    findings = []
    bound_together = [
        (one, other)
        for at, (one, cores) in enumerate(zip(ranks, allowed, strict=True))
        for other, others in list(zip(ranks, allowed, strict=True))[at + 1 :]
        if cores & others and len(cores) < len(everything)
    ]
    if number > len(everything):
        findings.append(
            Finding(
                Level.WARNING,
                "cores",
                f"{words}: ranks take turns" + ("" if first.yields else ", and a waiting rank keeps its core"),
                "a core for each rank",
                (
                    ""
                    if first.yields
                    else "export OMPI_MCA_mpi_yield_when_idle=1 (MPICH: MPIR_CVAR_POLLS_BEFORE_YIELD=10); "
                )
                + "start fewer ranks on a node, or see what limits the cores (taskset, --cpus-per-task, cpuset)",
            )
        )
    elif bound_together:
        one, other = bound_together[0]
        findings.append(
            Finding(
                Level.WARNING,
                "cores",
                f"{one} and {other} are bound to the same cores ({_list(ranks[one].allowed)} and {_list(ranks[other].allowed)})",
                "each rank on cores of its own",
                "mpirun --bind-to none: mpitrain then binds each rank itself; see also that two jobs do not share the node",
            )
        )
    if quota and number > quota:
        findings.append(
            Finding(
                Level.WARNING,
                "quota of cores",
                f"{number} ranks, and the container may use {quota:g} cores",
                "a core for each rank",
                "docker run --cpus N, resources.limits.cpu",
            )
        )
    threads = first.threads
    if threads and threads * number > max(have, number):
        findings.append(
            Finding(
                Level.WARNING,
                "OMP_NUM_THREADS",
                f"{threads} threads x {number} rank{'s' * (number > 1)} on {have:g} core{'s' * (have != 1)}",
                f"at most {max(int(have) // number, 1)} for each rank",
                f"unset OMP_NUM_THREADS, or export OMP_NUM_THREADS={max(int(have) // number, 1)}",
            )
        )
    if not findings:
        bound = sum(map(len, allowed)) == len(everything) and number > 1
        text = f"{words}, each bound to {len(first.allowed)} by the launcher" if bound else f"{words}, not bound"
        findings.append(ok("cores", text + (f"; OMP_NUM_THREADS={threads}" if threads else "")))
    return findings


def _list(cores: tuple[int, ...]) -> str:
    return names([str(core) for core in cores])


def judge_names(facts: Mapping[str, Names]) -> list[Finding]:
    """The names of all hosts."""
    findings = []
    several = len(facts) > 1
    for place, its in facts.items():
        if its.failure:
            findings.append(
                Finding(
                    Level.WARNING if several else Level.NOTE,
                    "host name",
                    f"{its.name} has no address: {its.failure}",
                    "a name that resolves on all hosts of the job",
                    f"add {its.name} with its address to /etc/hosts or DNS",
                    where=place if several else "",
                )
            )
        elif several and all(address.startswith("127.") or address == "::1" for address in its.addresses):
            findings.append(
                Finding(
                    Level.WARNING,
                    "host name",
                    f"{its.name} is {', '.join(its.addresses)} on the host itself",
                    "its address in the network",
                    f"remove {its.name} from the line of 127.0.0.1 or 127.0.1.1 in /etc/hosts",
                    where=place,
                )
            )
    double = len({its.name for its in facts.values()}) < len(facts)
    if double:
        findings.append(
            Finding(
                Level.NOTE,
                "host name",
                "several nodes have the same name, so reports cannot tell them apart",
                "different names",
                "give each container a name: docker run --hostname NAME",
            )
        )
    return findings[:4] or [ok("host name", f"{names([its.name for its in facts.values()])}: resolved")]
